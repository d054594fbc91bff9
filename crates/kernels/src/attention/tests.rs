use super::*;
use crate::testing::*;

impl Options {
    /// With the sinks that `to` makes of these.
    pub(super) fn map_sinks(&self, to: impl Fn(&Tensor) -> Tensor) -> Options {
        self.with_sinks(self.sinks.as_ref().map(to).as_ref())
    }
}

/// Sinks from much below what scores are to above them.
pub(super) fn some_sinks(heads: usize) -> Option<Tensor> {
    let sinks = (random(&[heads], 11) * 4.0).unwrap();
    Some(sinks)
}

#[derive(Clone)]
struct Case {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    first_key: Option<Tensor>,
    options: Options,
}

impl Case {
    fn new(
        batch: usize,
        queries: usize,
        keys: usize,
        heads: usize,
        kv_heads: usize,
        d: usize,
    ) -> Case {
        Case {
            q: random(&[batch, queries, heads, d], 1),
            k: random(&[batch, keys, kv_heads, d], 2),
            v: random(&[batch, keys, kv_heads, d], 3),
            d_o: random(&[batch, queries, heads, d], 4),
            first_key: None,
            options: Options { scale: 0.8, softcap: None, window: None, sinks: None },
        }
    }

    fn softcap(mut self, softcap: f64) -> Case {
        self.options.softcap = Some(softcap);
        self
    }

    fn window(mut self, window: usize) -> Case {
        self.options.window = Some(window);
        self
    }

    fn sinks(mut self) -> Case {
        self.options.sinks = some_sinks(self.q.dim(2).unwrap());
        self
    }

    #[cfg(any(feature = "cuda", not(feature = "metal")))]
    fn scale(mut self, scale: f64) -> Case {
        self.options.scale = scale;
        self
    }

    /// Records of a few tokens each packed into every row, starting at other places in each.
    fn packed(self, record: usize) -> Case {
        self.first_keys(|row, _, position| ((position + row) / record * record).saturating_sub(row))
    }

    /// First keys in no order.
    fn scattered(self) -> Case {
        self.first_keys(|_, index, position| index * 7919 % (position + 1))
    }

    /// `first` of a query's row, its number among those of all rows, and its position.
    fn first_keys(mut self, first: impl Fn(usize, usize, usize) -> usize) -> Case {
        let (batch, queries, ..) = self.q.dims4().unwrap();
        let before = self.k.dim(1).unwrap() - queries;
        let of = |i: usize| first(i / queries, i, before + i % queries) as u32;
        let all: Vec<_> = (0..batch * queries).map(of).collect();
        self.first_key = Some(Tensor::from_vec(all, (batch, queries), &Device::Cpu).unwrap());
        self
    }

    fn to_dtype(&self, dtype: DType) -> Case {
        let to = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
        let options = self.options.map_sinks(to);
        let (q, k, v, d_o) = (to(&self.q), to(&self.k), to(&self.v), to(&self.d_o));
        Case { q, k, v, d_o, options, ..self.clone() }
    }

    fn forward(&self) -> (Tensor, Tensor) {
        forward(&self.q, &self.k, &self.v, self.first_key.as_ref(), &self.options).unwrap()
    }

    fn backward(&self) -> (Tensor, Tensor, Tensor) {
        let (o, lse) = self.forward();
        let first_key = self.first_key.as_ref();
        backward(&self.q, &self.k, &self.v, &o, &lse, first_key, &self.options, &self.d_o).unwrap()
    }

    fn backward_sinks(&self) -> Tensor {
        let (o, lse) = self.forward();
        backward_sinks(self.options.sinks.as_ref().unwrap(), &o, &lse, &self.d_o).unwrap()
    }

    fn reference(&self) -> (Tensor, Tensor) {
        let (batch, queries, heads, d) = self.q.dims4().unwrap();
        let (_, keys, kv_heads, _) = self.k.dims4().unwrap();
        let (q, k, v) = (values(&self.q), values(&self.k), values(&self.v));
        let first_key = self.first_key.as_ref().map(values);
        let sinks = self.options.sinks.as_ref().map(values);
        let mut o = vec![0.0; q.len()];
        let mut lse = vec![f64::NEG_INFINITY; batch * heads * queries];
        for b in 0..batch {
            for i in 0..queries {
                let position = keys - queries + i;
                let first = first_key.as_ref().map_or(0, |first| first[b * queries + i] as usize);
                for h in 0..heads {
                    let kv = h / (heads / kv_heads);
                    let q = &q[((b * queries + i) * heads + h) * d..][..d];
                    let place = |j: usize| ((b * keys + j) * kv_heads + kv) * d;
                    let seen: Vec<usize> = (first..=position)
                        .filter(|j| self.options.window.is_none_or(|w| position - j < w))
                        .collect();
                    let score = |j: usize| {
                        let raw: f64 = q.iter().zip(&k[place(j)..]).map(|(q, k)| q * k).sum();
                        let raw = raw * self.options.scale;
                        self.options.softcap.map_or(raw, |c| c * (raw / c).tanh())
                    };
                    let of_sink = sinks.as_ref().map_or(0.0, |sinks| sinks[h].exp());
                    let total = of_sink + seen.iter().map(|j| score(*j).exp()).sum::<f64>();
                    lse[(b * heads + h) * queries + i] = total.ln();
                    for j in seen {
                        let p = score(j).exp() / total;
                        for e in 0..d {
                            o[((b * queries + i) * heads + h) * d + e] += p * v[place(j) + e];
                        }
                    }
                }
            }
        }
        (
            Tensor::from_vec(o, self.q.dims(), &Device::Cpu).unwrap(),
            Tensor::from_vec(lse, (batch, heads, queries), &Device::Cpu).unwrap(),
        )
    }
}

/// Sizes within a tile, over several of them, and of decoding.
fn cases() -> Vec<Case> {
    vec![
        Case::new(1, 1, 1, 1, 1, 1),
        Case::new(2, 5, 9, 4, 2, 7),
        Case::new(2, 5, 9, 4, 2, 7).packed(3).sinks(),
        Case::new(1, 5, 9, 3, 1, 7).window(2),
        Case::new(1, 5, 5, 2, 2, 33).softcap(0.7),
        Case::new(2, 7, 9, 4, 2, 3).softcap(1.3).window(3).packed(4).sinks(),
        Case::new(1, 1, 300, 6, 2, 16).sinks(),
        Case::new(2, 150, 290, 6, 2, 16),
        Case::new(2, 200, 200, 3, 3, 8).packed(70).window(150).sinks(),
        Case::new(1, 200, 200, 2, 1, 8).window(20).softcap(2.0),
        Case::new(2, 70, 90, 2, 1, 9).scattered().sinks(),
    ]
}

#[test]
fn forward_matches_reference() {
    for case in cases() {
        let ((o, lse), (exact_o, exact_lse)) = (case.forward(), case.reference());
        assert_close(&o, &exact_o, 1e-13);
        assert_close(&lse, &exact_lse, 1e-13);
    }
}

#[test]
fn backward_matches_finite_differences() {
    for case in cases().into_iter().take(6) {
        let (dq, dk, dv) = case.backward();
        let loss = |case: Case| inner_product(&case.forward().0, &case.d_o);
        assert_gradient(&case.q, &dq, |q| loss(Case { q: q.clone(), ..case.clone() }));
        assert_gradient(&case.k, &dk, |k| loss(Case { k: k.clone(), ..case.clone() }));
        assert_gradient(&case.v, &dv, |v| loss(Case { v: v.clone(), ..case.clone() }));
        if let Some(sinks) = &case.options.sinks {
            let with = |sinks: &Tensor| {
                let options = case.options.map_sinks(|_| sinks.clone());
                loss(Case { options, ..case.clone() })
            };
            assert_gradient(sinks, &case.backward_sinks(), with);
        }
    }
}

#[test]
fn backward_over_several_tiles_matches_finite_differences_along_a_direction() {
    for case in cases().into_iter().skip(6) {
        let (dq, dk, dv) = case.backward();
        let loss = |step: f64| {
            let moved = |tensor: &Tensor, seed| {
                (tensor + (random(tensor.dims(), seed) * step).unwrap()).unwrap()
            };
            let (q, k, v) = (moved(&case.q, 5), moved(&case.k, 6), moved(&case.v, 7));
            inner_product(&Case { q, k, v, ..case.clone() }.forward().0, &case.d_o).unwrap()
        };
        let expected = (loss(1e-5) - loss(-1e-5)) / 2e-5;
        let along = |gradient: &Tensor, seed| {
            inner_product(gradient, &random(gradient.dims(), seed)).unwrap()
        };
        let actual = along(&dq, 5) + along(&dk, 6) + along(&dv, 7);
        assert!((actual - expected).abs() < 1e-6 * (1.0 + expected.abs()), "{actual} {expected}");
    }
}

#[test]
fn other_precisions_match_f64() {
    for case in cases() {
        for (dtype, tolerance) in PRECISIONS {
            let low = case.to_dtype(dtype);
            let exact = low.to_dtype(DType::F64);
            let ((o, lse), (exact_o, exact_lse)) = (low.forward(), exact.forward());
            assert_eq!((o.dtype(), lse.dtype()), (dtype, DType::F32));
            assert_close(&o, &exact_o, tolerance);
            assert_close(&lse, &exact_lse, 2e-6);
            let ((dq, dk, dv), (exact_dq, exact_dk, exact_dv)) = (low.backward(), exact.backward());
            // The output enters the gradient rounded.
            assert_close(&dq, &exact_dq, 2.0 * tolerance);
            assert_close(&dk, &exact_dk, 2.0 * tolerance);
            assert_close(&dv, &exact_dv, 2.0 * tolerance);
            if case.options.sinks.is_some() {
                let dsinks = low.backward_sinks();
                assert_eq!(dsinks.dtype(), DType::F32);
                assert_close(&dsinks, &exact.backward_sinks(), 2.0 * tolerance);
            }
        }
    }
}

#[test]
fn a_sink_far_above_all_scores_takes_everything_and_one_far_below_nothing() {
    for queries in [1, 9] {
        let case = Case::new(1, queries, 9, 2, 1, 7).to_dtype(DType::F32);
        let with = |sinks: [f32; 2]| {
            let mut case = case.clone();
            case.options.sinks = Some(Tensor::new(&sinks, &Device::Cpu).unwrap());
            case
        };
        let (o, lse) = with([1000.0, 1000.0]).forward();
        assert_eq!(max_abs(&o), 0.0);
        assert!(values(&lse).iter().all(|lse| *lse == 1000.0));
        assert_eq!(values(&with([1000.0, 1000.0]).backward_sinks()), [0.0, 0.0]);
        for none in [-1000.0, f32::NEG_INFINITY] {
            let (o, lse) = with([none, none]).forward();
            assert_identical(&o, &case.forward().0);
            assert_identical(&lse, &case.forward().1);
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let mut case = Case::new(1, 9, 9, 2, 1, 7).to_dtype(DType::F32);
    case.options.scale = 1000.0;
    let (o, lse) = case.forward();
    assert!(values(&o).iter().chain(&values(&lse)).all(|value| value.is_finite()));
    let (dq, dk, dv) = case.backward();
    for gradient in [dq, dk, dv] {
        assert!(values(&gradient).iter().all(|value| value.is_finite()));
    }
}

#[test]
fn a_narrowed_cache_gives_the_same_as_a_copy() {
    for dtype in [DType::F64, DType::BF16] {
        let case = Case::new(2, 5, 9, 4, 2, 7).to_dtype(dtype);
        // Room for more tokens than are there, tokens first and heads first.
        let room = random(&[2, 20, 2, 7], 8).to_dtype(dtype).unwrap();
        let in_cache =
            |tensor: &Tensor| Tensor::cat(&[tensor, &room], 1).unwrap().narrow(1, 0, 9).unwrap();
        let heads_first = |tensor: &Tensor| {
            let cache = Tensor::cat(&[tensor, &room], 1).unwrap();
            let cache = cache.transpose(1, 2).unwrap().contiguous().unwrap();
            cache.narrow(2, 0, 9).unwrap().transpose(1, 2).unwrap()
        };
        let (o, lse) = case.forward();
        let gradients = case.backward();
        let views: [&dyn Fn(&Tensor) -> Tensor; 3] = [&in_cache, &heads_first, &strided];
        for view in views {
            let other = Case { k: view(&case.k), v: view(&case.v), ..case.clone() };
            assert!(!other.k.is_contiguous());
            assert_identical(&other.forward().0, &o);
            assert_identical(&other.forward().1, &lse);
            assert_identical(&other.backward().1, &gradients.1);
        }
        let other = Case { q: strided(&case.q), d_o: strided(&case.d_o), ..case.clone() };
        assert_identical(&other.forward().0, &o);
        assert_identical(&other.backward().0, &gradients.0);
    }
}

#[test]
fn a_query_without_keys_gives_zeros() {
    let mut case = Case::new(1, 3, 3, 2, 1, 4);
    case.first_key = Some(Tensor::new(&[[0u32, u32::MAX, 0]], &Device::Cpu).unwrap());
    let (o, lse) = case.forward();
    assert_eq!(max_abs(&o.narrow(1, 1, 1).unwrap()), 0.0);
    assert!(values(&lse)[1] == f64::NEG_INFINITY);
    let with_sinks = case.clone().sinks();
    let (o_of_sinks, lse_of_sinks) = with_sinks.forward();
    assert_eq!(max_abs(&o_of_sinks.narrow(1, 1, 1).unwrap()), 0.0);
    let sinks = with_sinks.options.sinks.as_ref().map(values).unwrap();
    assert_eq!(values(&lse_of_sinks)[1], sinks[0]);
    let (dq, dk, dv) = case.backward();
    assert_eq!(max_abs(&dq.narrow(1, 1, 1).unwrap()), 0.0);
    assert!(values(&dk).iter().chain(&values(&dv)).all(|value| value.is_finite()));
}

#[test]
fn threads_do_not_change_bits() {
    for dtype in [DType::F32, DType::BF16] {
        let case = Case::new(2, 150, 290, 6, 2, 16).packed(100).to_dtype(dtype);
        assert_independent_of_threads(|| {
            let (o, lse) = case.forward();
            let (dq, dk, dv) = case.backward();
            vec![o, lse, dq, dk, dv]
        });
    }
}

/// Otherwise every pass would leave this thread some more of what others had taken, up to as many as it keeps.
#[test]
fn working_memory_stays_with_the_thread_that_took_it() {
    let case = Case::new(1, 200, 200, 2, 2, 64);
    for _ in 0..40 {
        case.backward();
    }
    let kept = metal_candle_cpu::scratch::kept();
    assert!(kept < 40, "{kept} buffers");
}

#[test]
fn decoding_one_by_one_gives_what_the_whole_sequence_gives() {
    let case = Case::new(1, 9, 9, 4, 2, 7).window(4);
    let (whole, _) = case.forward();
    for token in 0..9 {
        let one = Case {
            q: case.q.narrow(1, token, 1).unwrap(),
            k: case.k.narrow(1, 0, token + 1).unwrap(),
            v: case.v.narrow(1, 0, token + 1).unwrap(),
            ..case.clone()
        };
        assert_close(&one.forward().0, &whole.narrow(1, token, 1).unwrap(), 1e-14);
    }
}

#[test]
fn empty_sizes_are_handled() {
    for case in
        [Case::new(0, 2, 3, 2, 1, 4), Case::new(1, 0, 3, 2, 1, 4), Case::new(1, 2, 3, 2, 1, 0)]
    {
        let (o, _) = case.forward();
        assert_eq!(o.dims(), case.q.dims());
        let (dq, dk, _) = case.backward();
        assert_eq!((dq.dims(), dk.dims()), (case.q.dims(), case.k.dims()));
    }
}

#[test]
fn wrong_arguments_are_errors() {
    let run = |case: Case| {
        message(forward(&case.q, &case.k, &case.v, case.first_key.as_ref(), &case.options))
    };
    assert!(run(Case::new(1, 2, 3, 3, 2, 4)).contains("q has 3 heads and k has 2"));
    assert!(run(Case::new(1, 4, 3, 2, 2, 4)).contains("4 queries but only 3 keys"));
    assert!(run(Case::new(1, 2, 3, 2, 2, 4).window(0)).contains("window is 0"));
    assert!(run(Case::new(1, 2, 3, 2, 2, 4).softcap(0.0)).contains("softcap is 0"));
    let case = Case::new(1, 2, 3, 2, 2, 4);
    let other = Case::new(1, 2, 4, 2, 2, 4);
    assert!(run(Case { v: other.v, ..case.clone() }).contains("v has shape [1, 4, 2, 4]"));
    let single = case.k.to_dtype(DType::F32).unwrap();
    assert!(run(Case { k: single, ..case.clone() }).contains("k is F32, expected F64"));
    let sinks = |sinks: Tensor| Case {
        options: Options { sinks: Some(sinks), ..case.options.clone() },
        ..case.clone()
    };
    assert!(run(sinks(random(&[3], 1))).contains("sinks has shape [3], expected [2]"));
    let single = random(&[2], 1).to_dtype(DType::F32).unwrap();
    assert!(run(sinks(single)).contains("sinks is F32, expected F64"));
    let first_key = Some(Tensor::zeros((1, 3), DType::U32, &Device::Cpu).unwrap());
    assert!(run(Case { first_key, ..case.clone() }).contains("first_key has shape [1, 3]"));
    let (o, lse) = case.forward();
    let options = &case.options;
    let wrong = message(backward(&case.q, &case.k, &case.v, &o, &o, None, options, &case.d_o));
    assert!(wrong.contains("log_sum_exp has shape"), "{wrong}");
    let wrong = message(backward(&case.q, &case.k, &case.v, &o, &lse, None, options, &lse));
    assert!(wrong.contains("d_o has shape"), "{wrong}");
}

#[cfg(not(feature = "metal"))]
mod metal;

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::batch_invariance::within;

    impl Case {
        fn to_device(&self, device: &Device) -> Case {
            let to = |tensor: &Tensor| tensor.to_device(device).unwrap();
            Case {
                q: to(&self.q),
                k: to(&self.k),
                v: to(&self.v),
                d_o: to(&self.d_o),
                first_key: self.first_key.as_ref().map(to),
                options: self.options.map_sinks(to),
            }
        }
    }

    fn on_cpu(tensor: &Tensor) -> Tensor {
        tensor.to_device(&Device::Cpu).unwrap()
    }

    /// The same numbers, compared by their bits.
    #[track_caller]
    fn assert_same(a: &Tensor, b: &Tensor) {
        assert_identical(&on_cpu(a), &on_cpu(b));
    }

    /// Runs `task` with the kernels of the device, once more with the heads of a group together, and with those that every
    /// device has.
    fn with_all_kernels(mut task: impl FnMut()) {
        use crate::attention::cuda::{AMPERE_ONLY, WHOLE_GROUPS};
        for (ampere, whole) in [(false, false), (false, true), (true, false)] {
            AMPERE_ONLY.set(ampere);
            WHOLE_GROUPS.set(whole);
            task();
        }
        AMPERE_ONLY.set(false);
    }

    /// Head dimensions of every kernel, over several tiles, with all options.
    fn many_queries() -> Vec<Case> {
        vec![
            Case::new(1, 128, 128, 1, 1, 64).scale(0.125),
            Case::new(2, 200, 200, 4, 2, 64).scale(0.125).sinks(),
            Case::new(1, 130, 391, 3, 3, 64).scale(0.2).packed(50),
            Case::new(1, 300, 300, 2, 1, 32).scale(0.3).window(70).sinks(),
            Case::new(2, 77, 200, 6, 2, 96).scale(0.1).softcap(1.5).window(40).packed(30).sinks(),
            Case::new(1, 150, 150, 2, 2, 80).scale(-0.2),
            Case::new(1, 257, 300, 8, 2, 128).scale(0.09).sinks(),
            Case::new(2, 129, 129, 2, 1, 128).scale(0.09).packed(33),
            Case::new(2, 520, 700, 4, 1, 128).scale(0.09),
            // On a GPU with 108 to 215 multiprocessors Hopper's backward kernel has two heads of a group in a block.
            Case::new(2, 200, 1100, 12, 3, 128).scale(0.09).packed(300).sinks(),
            Case::new(1, 650, 650, 4, 2, 120).scale(-0.1).packed(170),
            Case::new(1, 400, 1000, 2, 2, 72).scale(0.1).window(150).packed(320).sinks(),
            Case::new(1, 390, 390, 3, 1, 128).scale(0.09).softcap(1.5),
            Case::new(2, 400, 450, 2, 1, 128).scale(0.09).scattered(),
            Case::new(1, 200, 270, 2, 1, 104).scale(0.1).window(100).softcap(2.0),
            Case::new(1, 140, 140, 2, 1, 256).scale(0.06).sinks(),
            Case::new(2, 90, 130, 4, 2, 136).scale(0.1).window(50).packed(40).softcap(3.0),
            Case::new(2, 330, 500, 4, 2, 256).scale(0.06).softcap(1.5),
            Case::new(1, 400, 400, 3, 1, 248).scale(-0.06).packed(150),
            Case::new(2, 200, 270, 2, 2, 192).scale(0.07).window(90).packed(70).sinks(),
            Case::new(1, 300, 350, 2, 1, 256).scale(0.06).scattered(),
            Case::new(1, 65, 65, 2, 2, 300).scale(0.05).sinks(),
            Case::new(1, 70, 90, 4, 2, 30).scale(0.2).packed(20).sinks(),
        ]
    }

    /// As in decoding, also with keys enough to be split.
    fn few_queries() -> Vec<Case> {
        vec![
            Case::new(1, 1, 1, 4, 2, 64).scale(0.125),
            Case::new(1, 1, 2000, 8, 2, 64).scale(0.125).sinks(),
            Case::new(2, 1, 1025, 4, 1, 128).scale(0.09),
            Case::new(1, 1, 700, 3, 3, 96).scale(0.1).window(300).sinks(),
            Case::new(1, 1, 3000, 8, 1, 256).scale(0.06).softcap(2.0),
            Case::new(2, 7, 900, 6, 2, 128).scale(0.09).packed(250).sinks(),
            Case::new(1, 16, 600, 4, 2, 64).scale(0.125).window(400),
            Case::new(1, 16, 16, 4, 4, 72).scale(0.1).sinks(),
            Case::new(1, 4, 1500, 5, 1, 128).scale(-0.05),
            Case::new(1, 1, 1300, 6, 2, 33).scale(0.2).sinks(),
        ]
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_matches_the_cpu() {
        let device = crate::testing::cuda();
        for (index, case) in
            cases().into_iter().chain(many_queries()).chain(few_queries()).enumerate()
        {
            for (dtype, tolerance) in PRECISIONS {
                let low = case.to_dtype(dtype);
                let exact = low.to_dtype(DType::F64);
                let there = low.to_device(&device);
                let (exact_o, exact_lse) = exact.forward();
                let (exact_dq, exact_dk, exact_dv) = exact.backward();
                if case.options.sinks.is_some() {
                    let dsinks = on_cpu(&there.backward_sinks());
                    assert_close(&dsinks, &exact.backward_sinks(), 2.0 * tolerance);
                }
                with_all_kernels(|| {
                    eprintln!("case {index} {dtype:?} {:?} {:?}", case.q.dims(), case.k.dims());
                    for is_invariant in [false, true] {
                        let (o, lse) = within(is_invariant, || there.forward());
                        assert_eq!((o.dtype(), lse.dtype()), (dtype, DType::F32));
                        assert_close(&on_cpu(&o), &exact_o, tolerance);
                        assert_close(&on_cpu(&lse), &exact_lse, 5e-6);
                    }
                    let (dq, dk, dv) = there.backward();
                    assert_close(&on_cpu(&dq), &exact_dq, 2.0 * tolerance);
                    assert_close(&on_cpu(&dk), &exact_dk, 2.0 * tolerance);
                    assert_close(&on_cpu(&dv), &exact_dv, 2.0 * tolerance);
                });
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_gives_the_same_bits_again() {
        let device = crate::testing::cuda();
        // More blocks than run at once.
        let large = Case::new(5, 2500, 2500, 8, 2, 128).scale(0.09);
        let large = [large.clone().packed(700), large];
        for case in many_queries().into_iter().chain(few_queries()).chain(large) {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let case = case.to_dtype(dtype).to_device(&device);
                with_all_kernels(|| {
                    let invariant = || within(true, || case.forward()).0;
                    assert_same(&invariant(), &invariant());
                    let ((o, lse), (dq, dk, dv)) = (case.forward(), case.backward());
                    for _ in 0..3 {
                        let (again, lse_again) = case.forward();
                        assert_same(&again, &o);
                        assert_same(&lse_again, &lse);
                        let (dq_again, dk_again, dv_again) = case.backward();
                        assert_same(&dq_again, &dq);
                        assert_same(&dk_again, &dk);
                        assert_same(&dv_again, &dv);
                    }
                });
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_kernels_agree_where_blocks_wait_for_room() {
        let device = crate::testing::cuda();
        let whole = Case::new(6, 1500, 1500, 8, 2, 128).scale(0.09);
        for case in [whole.clone(), whole.clone().packed(400), whole.window(300)] {
            let case = case.to_dtype(DType::BF16).to_device(&device);
            let mut gradients = Vec::new();
            with_all_kernels(|| {
                let (dq, dk, dv) = case.backward();
                gradients.push([dq, dk, dv].map(|x| on_cpu(&x).to_dtype(DType::F64).unwrap()));
            });
            let last = gradients.pop().unwrap();
            for (found, expected) in gradients.iter().flat_map(|found| found.iter().zip(&last)) {
                assert_close(found, expected, 4e-2);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_reads_views_as_it_reads_copies() {
        let device = crate::testing::cuda();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (queries, keys, d) in [
                (70, 90, 64),
                (70, 90, 9),
                (1, 90, 64),
                (1, 90, 9),
                (40, 90, 128),
                (140, 300, 128),
                (140, 300, 256),
            ] {
                let case = Case::new(2, queries, keys, 4, 2, d).scale(0.1).to_dtype(dtype);
                let room = random(&[2, 20, 2, d], 8).to_dtype(dtype).unwrap();
                let room = room.to_device(&device).unwrap();
                let case = case.to_device(&device);
                let in_cache = |tensor: &Tensor| {
                    Tensor::cat(&[tensor, &room], 1).unwrap().narrow(1, 0, keys).unwrap()
                };
                let heads_first = |tensor: &Tensor| {
                    let cache = Tensor::cat(&[tensor, &room], 1).unwrap();
                    let cache = cache.transpose(1, 2).unwrap().contiguous().unwrap();
                    cache.narrow(2, 0, keys).unwrap().transpose(1, 2).unwrap()
                };
                // Rows that don't start at multiples of 16 bytes.
                let unaligned = |tensor: &Tensor| {
                    let wide = Tensor::cat(&[tensor, tensor], 3).unwrap();
                    let shifted = Tensor::cat(&[&wide.narrow(3, d - 1, 1).unwrap(), tensor], 3);
                    shifted.unwrap().narrow(3, 1, d).unwrap()
                };
                let transposed = |tensor: &Tensor| {
                    let transposed = tensor.transpose(1, 3).unwrap().contiguous().unwrap();
                    transposed.transpose(1, 3).unwrap()
                };
                let (o, lse) = case.forward();
                let (dq, dk, dv) = case.backward();
                let views: [&dyn Fn(&Tensor) -> Tensor; 5] =
                    [&in_cache, &heads_first, &strided, &unaligned, &transposed];
                for view in views {
                    let other = Case { k: view(&case.k), v: view(&case.v), ..case.clone() };
                    assert_same(&other.forward().0, &o);
                    assert_same(&other.forward().1, &lse);
                    let (dq_of_view, dk_of_view, dv_of_view) = other.backward();
                    assert_same(&dq_of_view, &dq);
                    assert_same(&dk_of_view, &dk);
                    assert_same(&dv_of_view, &dv);
                }
                let views: [&dyn Fn(&Tensor) -> Tensor; 3] = [&strided, &unaligned, &transposed];
                for view in views {
                    let other = Case { q: view(&case.q), d_o: view(&case.d_o), ..case.clone() };
                    assert_same(&other.forward().0, &o);
                    let (dq_of_view, dk_of_view, dv_of_view) = other.backward();
                    assert_same(&dq_of_view, &dq);
                    assert_same(&dk_of_view, &dk);
                    assert_same(&dv_of_view, &dv);
                }
                // One row and one head for all.
                let expand = |tensor: &Tensor| {
                    let one = tensor.narrow(0, 1, 1).unwrap().narrow(2, 0, 1).unwrap();
                    one.broadcast_as(tensor.dims()).unwrap()
                };
                let expanded = Case { k: expand(&case.k), v: expand(&case.v), ..case.clone() };
                let copied = Case {
                    k: expanded.k.force_contiguous().unwrap(),
                    v: expanded.v.force_contiguous().unwrap(),
                    ..case.clone()
                };
                assert_same(&expanded.forward().0, &copied.forward().0);
                let (found, expected) = (expanded.backward(), copied.backward());
                assert_same(&found.0, &expected.0);
                assert_same(&found.1, &expected.1);
                assert_same(&found.2, &expected.2);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_queries_without_keys_give_zeros() {
        let device = crate::testing::cuda();
        for (queries, d) in [(3, 4), (3, 64), (40, 64), (40, 4), (300, 128), (40, 256), (300, 256)]
        {
            let mut case = Case::new(1, queries, queries, 2, 1, d);
            let mut first = vec![0u32; queries];
            // One, or a whole tile.
            let without = if queries < 192 { 1..2 } else { 128..192 };
            first[without.clone()].fill(u32::MAX);
            case.first_key = Some(Tensor::from_vec(first, (1, queries), &Device::Cpu).unwrap());
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let case = case.to_dtype(dtype).to_device(&device);
                let of_them = |x: &Tensor| {
                    max_abs(&on_cpu(x).narrow(1, without.start, without.len()).unwrap())
                };
                with_all_kernels(|| {
                    let (o, lse) = case.forward();
                    assert_eq!(of_them(&o), 0.0);
                    assert!(values(&on_cpu(&lse))[without.start] == f64::NEG_INFINITY);
                    let (dq, dk, dv) = case.backward();
                    assert_eq!(of_them(&dq), 0.0);
                    let (dk, dv) = (values(&on_cpu(&dk)), values(&on_cpu(&dv)));
                    assert!(dk.iter().chain(&dv).all(|value| value.is_finite()));
                });
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_large_scores_do_not_overflow() {
        let device = crate::testing::cuda();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (queries, d) in [(9, 64), (40, 64), (40, 128)] {
                let case = Case::new(1, queries, 40, 2, 1, d).scale(1000.0).to_dtype(dtype);
                let case = case.to_device(&device);
                with_all_kernels(|| {
                    let (o, lse) = case.forward();
                    let (dq, dk, dv) = case.backward();
                    for tensor in [o, lse, dq, dk, dv] {
                        assert!(values(&on_cpu(&tensor)).iter().all(|value| value.is_finite()));
                    }
                });
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_handles_empty_sizes() {
        let device = crate::testing::cuda();
        for d in [0, 3, 64, 128] {
            for (batch, queries, keys, heads) in [
                (0, 2, 3, 2),
                (0, 20, 30, 2),
                (1, 0, 3, 2),
                (1, 0, 0, 2),
                (1, 20, 30, 2),
                (1, 20, 30, 0),
            ] {
                for dtype in [DType::F32, DType::BF16] {
                    // An empty tensor on the device is a part of one that isn't.
                    let whole = Case::new(1, queries.max(1), keys.max(1), 2, 1, d.max(1));
                    let whole = whole.window(2).to_dtype(dtype).to_device(&device);
                    let part = |tensor: &Tensor, tokens, heads| {
                        let part = tensor.narrow(0, 0, batch).unwrap().narrow(2, 0, heads).unwrap();
                        part.narrow(1, 0, tokens).unwrap().narrow(3, 0, d).unwrap()
                    };
                    let case = Case {
                        q: part(&whole.q, queries, heads),
                        k: part(&whole.k, keys, 1),
                        v: part(&whole.v, keys, 1),
                        d_o: part(&whole.d_o, queries, heads),
                        ..whole
                    };
                    let invariant = || within(true, || case.forward()).0;
                    assert_same(&invariant(), &invariant());
                    let ((o, lse), (dq, dk, dv)) = (case.forward(), case.backward());
                    assert_eq!(o.dims(), case.q.dims());
                    assert_eq!(lse.dims(), [batch, heads, queries]);
                    assert_eq!((dq.dims(), dk.dims()), (case.q.dims(), case.k.dims()));
                    if queries * heads == 0 {
                        assert_eq!((max_abs(&on_cpu(&dk)), max_abs(&on_cpu(&dv))), (0.0, 0.0));
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_refuses_what_it_cannot_compute() {
        let device = crate::testing::cuda();
        let run = |case: Case| {
            message(forward(&case.q, &case.k, &case.v, case.first_key.as_ref(), &case.options))
        };
        let case = Case::new(1, 2, 3, 2, 2, 8).packed(2);
        assert!(run(case.to_device(&device)).contains("does not support F64"));
        let case = case.to_dtype(DType::BF16);
        let there = case.to_device(&device);
        assert!(run(Case { k: case.k.clone(), ..there.clone() }).contains("all on one device"));
        let first_key = case.first_key.clone();
        assert!(run(Case { first_key, ..there.clone() }).contains("all on one device"));
        let (o, lse) = there.forward();
        let wrong = message(backward(
            &there.q,
            &there.k,
            &there.v,
            &o,
            &lse.to_dtype(DType::BF16).unwrap(),
            None,
            &there.options,
            &there.d_o,
        ));
        assert!(wrong.contains("log_sum_exp is BF16, expected F32"), "{wrong}");
    }
}
