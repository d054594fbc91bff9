use super::*;
use crate::testing::*;
use candle_core::Device;

const OPTIONS: Options = Options {
    learning_rate: 1e-2,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-6,
    weight_decay: 0.1,
    bias_correction: true,
};

/// Codes and scales of both moments.
struct Kept {
    codes: [Tensor; 2],
    scales: [Tensor; 2],
}

impl Kept {
    fn zeros(n: usize, device: &Device) -> Kept {
        let of = |n: usize, dtype| Tensor::zeros(n, dtype, &Device::Cpu).unwrap();
        let there = |tensor: Tensor| tensor.to_device(device).unwrap();
        let blocks = n.div_ceil(BLOCK);
        Kept {
            codes: [(); 2].map(|()| there(of(n, DType::U8))),
            scales: [(); 2].map(|()| there(of(blocks, DType::F32))),
        }
    }

    /// Zeros in memory of the host that the device reaches, while the second lives.
    #[cfg(feature = "cuda")]
    fn pinned(n: usize, device: &Device) -> (Kept, crate::host::HostBuffers) {
        let (codes, scales) = ((vec![n], DType::U8), (vec![n.div_ceil(BLOCK)], DType::F32));
        let like = [codes.clone(), codes, scales.clone(), scales];
        let buffers = crate::host::HostBuffers::new(&like, device).unwrap();
        let [m_codes, v_codes, m_scales, v_scales] = buffers.tensors() else { unreachable!() };
        let kept = Kept {
            codes: [m_codes.clone(), v_codes.clone()],
            scales: [m_scales.clone(), v_scales.clone()],
        };
        (kept, buffers)
    }

    fn moments(&self) -> Moments<'_> {
        let Kept { codes: [m_codes, v_codes], scales: [m_scales, v_scales] } = self;
        Moments { m_codes, m_scales, v_codes, v_scales }
    }

    /// Both moments as numbers.
    fn decoded(&self) -> [Vec<f64>; 2] {
        let levels = [&TABLES.signed, &TABLES.unsigned];
        [0, 1].map(|index| {
            let codes: Vec<u8> = here(&self.codes[index]).to_vec1().unwrap();
            let scales = values(&here(&self.scales[index]));
            let decode = |(i, code): (usize, &u8)| {
                f64::from(levels[index][usize::from(*code)]) * scales[i / BLOCK]
            };
            codes.iter().enumerate().map(decode).collect()
        })
    }
}

fn own(n: usize, seed: u64) -> Tensor {
    random(&[n], seed).to_dtype(DType::F32).unwrap().copy().unwrap()
}

#[test]
fn levels_are_those_of_the_dynamic_data_type() {
    for levels in [&TABLES.signed, &TABLES.unsigned] {
        assert!(levels.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(levels[LEVELS - 1], 1.0);
        assert!(levels.contains(&0.0));
    }
    // Of the appendix of the paper: 64 and 128 levels from 0.1 to 1.
    let above = |levels: &[f32; LEVELS]| levels.iter().filter(|x| **x > 0.1 && **x < 1.0).count();
    assert_eq!((above(&TABLES.signed), above(&TABLES.unsigned)), (64, 128));
    assert!((TABLES.signed[0] + 1.0 - 0.9 / 128.0).abs() < 1e-7);
    assert!((TABLES.unsigned[1] - 3.25e-7).abs() < 1e-12);
}

/// Every step starts from what is kept: AdamW in f64, and then the level nearest to each moment.
#[test]
fn steps_are_adamws_with_moments_rounded_to_the_nearest_level() {
    for n in [1, 255, 256, 257, 20_000] {
        let (params, kept) = (own(n, 1), Kept::zeros(n, &Device::Cpu));
        for number in 1..=4 {
            let grads = own(n, 10 + number as u64);
            let (mut p, g) = (values(&params), values(&grads));
            let [mut m, mut v] = kept.decoded();
            step(&params, &grads, kept.moments(), number, 0.5, &OPTIONS).unwrap();
            assert_eq!(max_abs(&grads), 0.0);
            for (((p, g), m), v) in p.iter_mut().zip(&g).zip(&mut m).zip(&mut v) {
                let g = g * 0.5;
                *m = 0.9 * *m + 0.1 * g;
                *v = 0.99 * *v + 0.01 * g * g;
                let [m, v] = [(*m, 0.9), (*v, 0.99f64)]
                    .map(|(mean, beta)| mean / (1.0 - beta.powi(number as i32)));
                *p = *p * (1.0 - 1e-3) - 1e-2 * m / (v.sqrt() + 1e-6);
            }
            let p = Tensor::from_vec(p, n, &Device::Cpu).unwrap();
            assert_close(&params, &p, 2e-6);
            let levels = [&TABLES.signed, &TABLES.unsigned];
            for ((found, exact), levels) in kept.decoded().iter().zip([m, v]).zip(levels) {
                for (found, exact) in found.chunks(BLOCK).zip(exact.chunks(BLOCK)) {
                    let most = exact.iter().fold(0f64, |most, x| most.max(x.abs()));
                    for (found, exact) in found.iter().zip(exact) {
                        let nearest = levels
                            .iter()
                            .map(|level| (exact - f64::from(*level) * most).abs())
                            .fold(f64::INFINITY, f64::min);
                        let error = (found - exact).abs();
                        assert!(error <= nearest + 1e-6 * most, "{found} for {exact} of {most}");
                    }
                }
            }
        }
    }
}

#[test]
fn without_a_gradient_nothing_moves() {
    let (params, kept) = (own(300, 1), Kept::zeros(300, &Device::Cpu));
    let before = values(&params);
    let grads = Tensor::zeros(300, DType::F32, &Device::Cpu).unwrap();
    let options = Options { weight_decay: 0.0, ..OPTIONS };
    for number in 1..=2 {
        step(&params, &grads, kept.moments(), number, 1.0, &options).unwrap();
        assert_eq!(values(&params), before);
    }
}

#[test]
fn threads_do_not_change_bits() {
    assert_independent_of_threads(|| {
        let (params, kept) = (own(50_000, 1), Kept::zeros(50_000, &Device::Cpu));
        for number in 1..=2 {
            step(&params, &own(50_000, 2), kept.moments(), number, 1.0, &OPTIONS).unwrap();
        }
        let Kept { codes: [m, v], scales: [m_scales, v_scales] } = kept;
        vec![params, m, v, m_scales, v_scales]
    });
}

#[test]
fn mistakes_are_errors() {
    let ones = |n: usize| Tensor::ones(n, DType::F32, &Device::Cpu).unwrap();
    let kept = Kept::zeros(300, &Device::Cpu);
    let run = |params: &Tensor, grads: &Tensor, kept: Moments, number| {
        message(step(params, grads, kept, number, 1.0, &OPTIONS))
    };
    let good = kept.moments();
    assert!(run(&ones(300), &ones(300), good, 0).contains("the step is 0"));
    let wrong = run(&ones(300), &ones(299), good, 1);
    assert!(wrong.contains("grads has shape [299], expected [300]"), "{wrong}");
    let wrong = run(&ones(600), &ones(600), good, 1);
    assert!(wrong.contains("m_codes has shape [300], expected [600]"), "{wrong}");
    let wrong = run(&ones(300), &ones(300), Moments { v_codes: &ones(300), ..good }, 1);
    assert!(wrong.contains("v_codes is F32, expected U8"), "{wrong}");
    let wrong = run(&ones(300), &ones(300), Moments { v_scales: good.m_scales, ..good }, 1);
    assert!(wrong.contains("must be tensors of their own"), "{wrong}");
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_steps_match_the_cpu() {
    let device = crate::testing::cuda();
    for n in [1, 255, 257, 40_000, 1_000_003] {
        let (params, kept) = (own(n, 1), Kept::zeros(n, &Device::Cpu));
        let on_device = || params.to_device(&device).unwrap();
        let first = (on_device(), Kept::zeros(n, &device));
        // In memory of the host.
        let (second, _pinned) = Kept::pinned(n, &device);
        let second = (on_device(), second);
        for number in 1..=3 {
            let grads = own(n, 10 + number as u64);
            for (params, kept) in [&first, &second] {
                let grads = grads.to_device(&device).unwrap();
                step(params, &grads, kept.moments(), number, 0.5, &OPTIONS).unwrap();
                assert_eq!(max_abs(&here(&grads)), 0.0);
            }
            step(&params, &grads, kept.moments(), number, 0.5, &OPTIONS).unwrap();
        }
        for index in 0..2 {
            assert_close(&here(&first.1.scales[index]), &kept.scales[index], 1e-3);
            assert_identical(&here(&first.1.codes[index]), &here(&second.1.codes[index]));
            // Rounding decides between two levels now and then.
            let (found, exact) = (values(&here(&first.1.codes[index])), values(&kept.codes[index]));
            let others = found.iter().zip(&exact).filter(|(found, exact)| found != exact).count();
            assert!(others * 1000 <= n, "{others} of {n} codes are others");
        }
        assert_identical(&here(&first.0), &here(&second.0));
        let pairs = values(&here(&first.0)).into_iter().zip(values(&params));
        let off = pairs.filter(|(found, exact)| (found - exact).abs() > 1e-5).count();
        assert!(off * 1000 <= n, "{off} of {n} parameters are off");
    }
}
