use super::*;
use crate::testing::*;

/// A batch whose rows have different adapters, for layers that read the same x.
#[derive(Clone)]
struct Case {
    x: Tensor,
    ys: Vec<Tensor>,
    /// A, B and the scale of each adapter for each layer.
    adapters: Vec<Vec<Option<(Tensor, Tensor, f64)>>>,
    of_rows: Vec<Option<usize>>,
}

impl Case {
    /// `ranks[i][l]` is that of adapter `i` for layer `l`, 0 where it has none.
    fn new(
        inner: usize,
        outers: &[usize],
        ranks: &[&[usize]],
        of_rows: Vec<Option<usize>>,
    ) -> Case {
        let rows = of_rows.len();
        let adapters = (1..).zip(ranks).map(|(index, ranks)| {
            let layers = (0..).zip(outers.iter().zip(*ranks)).map(|(layer, (outer, rank))| {
                let seed = 100 * index + 10 * layer;
                (*rank > 0).then(|| {
                    let a =
                        (random(&[inner, *rank], seed) * (2.0 / (inner as f64).sqrt())).unwrap();
                    (a, random(&[*rank, *outer], seed + 1), 0.25 * index as f64)
                })
            });
            layers.collect()
        });
        let ys = (0..).zip(outers).map(|(layer, outer)| random(&[rows, *outer], 7 + layer));
        Case {
            x: random(&[rows, inner], 1),
            ys: ys.collect(),
            adapters: adapters.collect(),
            of_rows,
        }
    }

    /// All adapters have all layers.
    fn of_ranks(inner: usize, outers: &[usize], ranks: &[usize], rows: usize) -> Case {
        let ranks: Vec<Vec<usize>> = ranks.iter().map(|rank| vec![*rank; outers.len()]).collect();
        let ranks: Vec<&[usize]> = ranks.iter().map(Vec::as_slice).collect();
        Case::new(inner, outers, &ranks, in_turn(rows, ranks.len()))
    }

    /// Activations of this dtype, and adapters of f32, which are rounded to it where CUDA does so.
    fn to_dtype(&self, dtype: DType, device: &Device) -> Case {
        let to = |tensor: &Tensor| there(&tensor.to_dtype(dtype).unwrap(), device);
        let factor = |tensor: &Tensor| {
            let tensor = if device.is_cuda() { rounded(tensor, dtype) } else { tensor.clone() };
            let stored = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            there(&tensor.to_dtype(stored).unwrap(), device)
        };
        let adapters = self.adapters.iter().map(|layers| {
            let layers = layers
                .iter()
                .map(|found| found.as_ref().map(|(a, b, scale)| (factor(a), factor(b), *scale)));
            layers.collect()
        });
        Case {
            x: to(&self.x),
            ys: self.ys.iter().map(to).collect(),
            adapters: adapters.collect(),
            of_rows: self.of_rows.clone(),
        }
    }

    fn adapters(&self) -> Result<Adapters> {
        let (dtype, device) = (self.x.dtype(), self.x.device());
        let factors = |(a, b, scale): &(Tensor, Tensor, f64)| {
            Ok::<_, candle_core::Error>(Arc::new(Factors::new(a, b, *scale, dtype)?))
        };
        let adapters = self
            .adapters
            .iter()
            .map(|layers| layers.iter().map(|it| it.as_ref().map(factors).transpose()).collect())
            .collect::<Result<Vec<_>>>()?;
        Adapters::new(&adapters, dtype, device)
    }

    /// What all layers give of copies of their y.
    fn run(&self) -> Result<Vec<Tensor>> {
        let ys = self.ys.iter().map(Tensor::copy).collect::<Result<Vec<_>>>()?;
        let layers: Vec<_> = ys.iter().enumerate().collect();
        let rows = Rows::new(&self.of_rows, self.x.device())?;
        add_updates(&self.x, &layers, &self.adapters()?, &rows)?;
        Ok(ys)
    }

    fn forward(&self) -> Vec<Tensor> {
        self.run().unwrap().iter().map(here).collect()
    }

    /// In f64, row by row, from the numbers as they are stored.
    fn expected(&self) -> Vec<Tensor> {
        let wide = |tensor: &Tensor| here(tensor).to_dtype(DType::F64).unwrap();
        let x = wide(&self.x);
        let of_layer = |(layer, y): (usize, &Tensor)| {
            let y = wide(y);
            if self.of_rows.is_empty() {
                return y;
            }
            let row = |(row, adapter): (usize, &Option<usize>)| {
                let y = y.narrow(0, row, 1).unwrap();
                let found = adapter.and_then(|adapter| self.adapters[adapter][layer].as_ref());
                let Some((a, b, scale)) = found else { return y };
                let xa = x.narrow(0, row, 1).unwrap().matmul(&wide(a)).unwrap();
                (y + (xa.matmul(&wide(b)).unwrap() * *scale).unwrap()).unwrap()
            };
            let rows: Vec<_> = self.of_rows.iter().enumerate().map(row).collect();
            Tensor::cat(&rows, 0).unwrap()
        };
        self.ys.iter().enumerate().map(of_layer).collect()
    }

    /// Some of the rows by themselves.
    fn only(&self, rows: &[usize]) -> Case {
        let chosen = |tensor: &Tensor| {
            let rows: Vec<_> = rows.iter().map(|row| tensor.narrow(0, *row, 1).unwrap()).collect();
            Tensor::cat(&rows, 0).unwrap()
        };
        Case {
            x: chosen(&self.x),
            ys: self.ys.iter().map(chosen).collect(),
            of_rows: rows.iter().map(|row| self.of_rows[*row]).collect(),
            ..self.clone()
        }
    }

    #[track_caller]
    fn assert_right(&self, tolerance: f64) {
        for (found, expected) in self.forward().iter().zip(self.expected()) {
            assert_close(found, &expected, tolerance);
        }
    }

    /// Rows alone, and a half of them, have the bits that they have among all.
    #[track_caller]
    fn assert_same_in_any_company(&self) {
        let together = self.forward();
        let count = self.of_rows.len();
        let alone = (0..count).step_by(count.div_ceil(9)).map(|row| vec![row]);
        for rows in alone.chain([(0..count).step_by(2).rev().collect()]) {
            for (found, together) in self.only(&rows).forward().iter().zip(&together) {
                for (index, row) in rows.iter().enumerate() {
                    let found = found.narrow(0, index, 1).unwrap();
                    assert_identical(&found, &together.narrow(0, *row, 1).unwrap());
                }
            }
        }
    }
}

/// Rows that have one of so many adapters, or none, in turn.
fn in_turn(rows: usize, adapters: usize) -> Vec<Option<usize>> {
    (0..rows).map(|row| (row * 5 % (adapters + 1)).checked_sub(1)).collect()
}

/// Odd and even sizes, ranks that are mixed, one row and many, and adapters without some of the layers.
fn cases() -> Vec<Case> {
    let many = [vec![Some(1); 70], in_turn(60, 3), vec![Some(2); 33]].concat();
    vec![
        Case::of_ranks(7, &[5], &[1], 1),
        Case::of_ranks(33, &[40, 9], &[3, 8, 1, 17], 11),
        Case::of_ranks(64, &[48, 16, 16], &[8, 64, 16, 24, 5, 32, 1, 9, 2], 37),
        Case::of_ranks(1100, &[528], &[12, 40], 5),
        Case::of_ranks(2056, &[24, 264], &[64, 8, 70], 20),
        Case::new(40, &[24, 32], &[&[4, 0], &[0, 9], &[16, 16]], many),
        Case::new(48, &[24], &[&[80], &[8]], vec![None, Some(1), None, None]),
        Case::of_ranks(16, &[8], &[4], 0),
        Case::new(16, &[8], &[], vec![None; 3]),
    ]
}

fn assert_right_on(device: &Device) {
    for case in cases() {
        for (dtype, tolerance) in PRECISIONS {
            case.to_dtype(dtype, device).assert_right(tolerance);
        }
    }
}

#[test]
fn rows_get_the_updates_of_their_adapters() {
    assert_right_on(&Device::Cpu);
    for case in cases() {
        case.to_dtype(DType::F64, &Device::Cpu).assert_right(1e-14);
    }
}

#[test]
fn rows_give_the_same_bits_in_any_company() {
    for case in cases().iter().filter(|case| !case.of_rows.is_empty()) {
        for dtype in [DType::F32, DType::BF16] {
            case.to_dtype(dtype, &Device::Cpu).assert_same_in_any_company();
        }
    }
}

#[test]
fn threads_change_nothing() {
    let case =
        Case::of_ranks(300, &[700, 64], &[8, 33, 16], 150).to_dtype(DType::F32, &Device::Cpu);
    assert_independent_of_threads(|| case.forward());
}

/// x and y with strides, and adapters of other dtypes.
fn assert_reads_views(device: &Device) {
    for (inner, outer) in [(24, 40), (23, 9)] {
        let case = Case::of_ranks(inner, &[outer], &[8, 3], 21);
        for (dtype, _) in PRECISIONS {
            let case = case.to_dtype(dtype, device);
            let expected = case.forward();
            let of_view = Case { x: strided(&case.x), ..case.clone() };
            assert_identical(&of_view.forward()[0], &expected[0]);
            let [before, after] = [3, 5].map(|width| random(&[21, width], 9));
            let sides = [before, after].map(|it| there(&it.to_dtype(dtype).unwrap(), device));
            let wide = Tensor::cat(&[&sides[0], &case.ys[0], &sides[1]], 1).unwrap();
            let y = wide.narrow(1, 3, outer).unwrap();
            let rows = Rows::new(&case.of_rows, device).unwrap();
            add_updates(&case.x, &[(0, &y)], &case.adapters().unwrap(), &rows).unwrap();
            let (found, expected) = (here(&y.contiguous().unwrap()), &expected[0]);
            assert_close(&found, &expected.to_dtype(DType::F64).unwrap(), 1e-2);
            for (start, side) in [(0, &sides[0]), (3 + outer, &sides[1])] {
                let found = wide.narrow(1, start, side.dim(1).unwrap()).unwrap();
                assert_identical(&here(&found.contiguous().unwrap()), &here(side));
            }
        }
    }
}

#[test]
fn views_are_read_and_written() {
    assert_reads_views(&Device::Cpu);
}

#[test]
fn what_does_not_fit_is_refused() {
    let case = Case::of_ranks(8, &[6], &[2, 3], 4).to_dtype(DType::F32, &Device::Cpu);
    let (adapters, y) = (case.adapters().unwrap(), &case.ys[0]);
    let rows = |of_rows: &[Option<usize>]| Rows::new(of_rows, &Device::Cpu).unwrap();
    let with = |x: &Tensor, layer, y: &Tensor, of_rows: &[Option<usize>]| {
        message(add_updates(x, &[(layer, y)], &adapters, &rows(of_rows)))
    };
    let of_rows = &case.of_rows;
    let wrong = with(&case.x, 0, y, &of_rows[1..]);
    assert!(wrong.contains("x has 4 rows, expected 3"), "{wrong}");
    let wrong = with(&case.x, 1, y, of_rows);
    assert!(wrong.contains("there is no layer 1, expected less than 1"), "{wrong}");
    let wrong = with(&case.x, 0, y, &[None, None, None, Some(2)]);
    assert!(wrong.contains("rows have 3 adapters, of which there are 2"), "{wrong}");
    let wrong = with(&case.x.narrow(1, 0, 7).unwrap(), 0, y, of_rows);
    assert!(wrong.contains("expected 4 rows of 8 and of 6"), "{wrong}");
    let wrong = with(&case.x, 0, &y.to_dtype(DType::BF16).unwrap(), of_rows);
    assert!(wrong.contains("y is BF16, expected F32"), "{wrong}");
    let across = y.t().unwrap().contiguous().unwrap().t().unwrap();
    let wrong = with(&case.x, 0, &across, of_rows);
    assert!(wrong.contains("at one distance"), "{wrong}");
    let wrong = with(&case.x.to_dtype(DType::BF16).unwrap(), 0, y, of_rows);
    assert!(wrong.contains("x is BF16, expected F32"), "{wrong}");
    let (a, b, _) = case.adapters[0][0].as_ref().unwrap();
    let wrong = message(Factors::new(a, &b.t().unwrap(), 1.0, DType::F32));
    assert!(wrong.contains("B has shape [6, 2], expected [2, 2]"), "{wrong}");
    let wrong = message(Factors::new(a, b, 1.0, DType::U32));
    assert!(wrong.contains("found U32 activations"), "{wrong}");
    let factors = |dtype| Some(Arc::new(Factors::new(a, b, 1.0, dtype).unwrap()));
    let made = |adapters: &[Vec<Option<Arc<Factors>>>]| {
        message(Adapters::new(adapters, DType::F32, &Device::Cpu))
    };
    let wrong = made(&[vec![factors(DType::F32)], vec![]]);
    assert!(wrong.contains("adapter 1 has 0 layers, expected 1"), "{wrong}");
    let wrong = made(&[vec![factors(DType::BF16)]]);
    assert!(wrong.contains("laid out for BF16 on Cpu, expected F32"), "{wrong}");
    let other = Factors::new(&random(&[5, 2], 1), &random(&[2, 6], 1), 1.0, DType::F32).unwrap();
    let wrong = made(&[vec![factors(DType::F32)], vec![Some(Arc::new(other))]]);
    assert!(wrong.contains("a layer 0 of 6 by 5, expected 6 by 8 as others"), "{wrong}");
    let wrong = message(Rows::with_room(&[Some(2)], 2, &Device::Cpu));
    assert!(wrong.contains("adapter 2, expected less than 2"), "{wrong}");
    let numbers = Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap();
    let wrong = message(rows(of_rows).reading(&numbers));
    assert!(wrong.contains("numbers has shape [3]"), "{wrong}");
    let known = rows(of_rows);
    let apart = Tensor::zeros((known.numbers().len(), 2), DType::U32, &Device::Cpu).unwrap();
    let wrong = message(known.reading(&apart.get_on_dim(1, 0).unwrap()));
    assert!(wrong.contains("the numbers aren't contiguous"), "{wrong}");
}

/// How many items there is room for.
fn room_of(rows: &Rows) -> usize {
    (rows.numbers().len() - rows.plan.items) / ITEM_NUMBERS
}

#[test]
fn numbers_of_batches_with_one_room_have_the_same_places() {
    let numbers = |of_rows: &[Option<usize>]| {
        let rows = Rows::with_room(of_rows, 5, &Device::Cpu).unwrap();
        (rows.numbers().len(), rows.plan.items, room_of(&rows))
    };
    let same = numbers(&[None; 40]);
    assert_eq!(same.2, 7);
    for of_rows in [vec![Some(3); 40], in_turn(40, 5), in_turn(40, 2)] {
        assert_eq!(numbers(&of_rows), same);
        let rows = Rows::with_room(&of_rows, 5, &Device::Cpu).unwrap();
        assert!(rows.numbers()[0] as usize <= room_of(&rows));
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::recording::Recording;

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_rows_get_the_updates_of_their_adapters() {
        assert_right_on(&cuda());
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_rows_give_the_same_bits_in_any_company() {
        let device = cuda();
        for case in cases().iter().filter(|case| !case.of_rows.is_empty()) {
            for (dtype, _) in PRECISIONS {
                case.to_dtype(dtype, &device).assert_same_in_any_company();
            }
        }
        // Several items of an adapter, parts of x·A, more ranks than are taken at once, and columns in turns.
        let case = Case::of_ranks(4360, &[6008, 8], &[64, 8, 40, 100], 200);
        for (dtype, tolerance) in PRECISIONS {
            let case = case.to_dtype(dtype, &device);
            case.assert_right(tolerance);
            case.assert_same_in_any_company();
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_views_are_read_and_written() {
        assert_reads_views(&cuda());
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_recordings_run_for_other_rows() {
        let device = cuda();
        for dtype in [DType::F32, DType::BF16] {
            let case = Case::of_ranks(64, &[40, 48], &[8, 16, 33], 12).to_dtype(dtype, &device);
            let adapters = case.adapters().unwrap();
            let with_room =
                |of_rows: &[Option<usize>]| Rows::with_room(of_rows, 3, &device).unwrap();
            let rows = with_room(&case.of_rows);
            let mut recording = Recording::new(&device, rows.numbers(), |numbers| {
                let y = copy::cast(&copy::cast(&case.ys[0], DType::F16)?, dtype)?;
                let other = copy::cast(&copy::cast(&case.ys[1], DType::F16)?, dtype)?;
                add_updates(&case.x, &[(0, &y), (1, &other)], &adapters, &rows.reading(numbers)?)?;
                Ok::<_, candle_core::Error>(y)
            })
            .unwrap();
            for of_rows in [vec![None; 12], vec![Some(2); 12], in_turn(12, 3), in_turn(12, 2)] {
                recording.run(with_room(&of_rows).numbers()).unwrap();
                let y = rounded(&here(&case.ys[0]), DType::F16).to_dtype(dtype).unwrap();
                let ys = vec![y.to_device(&device).unwrap(), case.ys[1].clone()];
                let expected = Case { of_rows, ys, ..case.clone() }.forward();
                assert_identical(&here(recording.output()), &expected[0]);
            }
        }
    }

    /// `cargo test --release … cuda_time_of_rows -- --ignored --nocapture`
    #[test]
    #[ignore = "needs an NVIDIA GPU, and is a measurement"]
    fn cuda_time_of_rows() {
        let device = cuda();
        let ranks: Vec<usize> = (0..64).map(|index| 8 << (index % 4)).collect();
        for rows in [1, 64, 256, 2048] {
            for (inner, outers) in
                [(4096, &[4096, 1024, 1024][..]), (4096, &[14336, 14336]), (14336, &[4096])]
            {
                let mut case = Case::of_ranks(8, &[], &ranks, rows);
                case.x = random(&[rows, inner], 1);
                case.ys = outers.iter().map(|outer| random(&[rows, *outer], 2)).collect();
                for (adapter, rank) in case.adapters.iter_mut().zip(&ranks) {
                    let of_layer = |outer: &usize| {
                        Some((random(&[inner, *rank], 3), random(&[*rank, *outer], 4), 1.0))
                    };
                    *adapter = outers.iter().map(of_layer).collect();
                }
                case.of_rows = (0..rows).map(|row| Some(row % 64)).collect();
                let case = case.to_dtype(DType::BF16, &device);
                let (adapters, of_rows) =
                    (case.adapters().unwrap(), Rows::new(&case.of_rows, &device).unwrap());
                let layers: Vec<_> = case.ys.iter().enumerate().collect();
                let seconds = least_seconds(&device, 20, || {
                    for _ in 0..20 {
                        add_updates(&case.x, &layers, &adapters, &of_rows).unwrap();
                    }
                });
                let best = seconds / 20.0;
                let used = ranks.iter().take(rows.min(64)).sum::<usize>();
                let bytes = outers.iter().map(|outer| 2 * used * (inner + outer)).sum::<usize>();
                println!(
                    "{rows} rows, {inner} to {outers:?}: {:.1} us, factors at {:.0} GB/s",
                    best * 1e6,
                    bytes as f64 / best / 1e9
                );
            }
        }
    }
}

/// The Metal kernels as the host starts them, in the emulator: compiled for speed, for bounds and for races, with
/// several orders and numbers of threads.
#[cfg(not(feature = "metal"))]
mod metal {
    use super::*;
    use crate::backend::metal::{Emulator, emulate};
    use metal_emulator::{Mode, SEEDS};

    #[test]
    #[ignore = "needs clang"]
    fn metal_rows_get_the_updates_of_their_adapters() {
        for mode in Mode::ALL {
            let emulator = Emulator::open(mode);
            for (index, case) in cases().iter().enumerate() {
                for (seed, most_threads) in SEEDS.into_iter().zip([33, 1024, 90]) {
                    let emulator = Emulator { seed, most_threads, ..emulator.clone() };
                    let (dtype, tolerance) = PRECISIONS[(index + seed as usize) % PRECISIONS.len()];
                    let case = case.to_dtype(dtype, &Device::Cpu);
                    let found = emulate(emulator, || case.forward());
                    for (found, expected) in found.iter().zip(case.expected()) {
                        assert_close(found, &expected, tolerance);
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_rows_give_the_same_bits_in_any_company() {
        for case in cases().iter().filter(|case| !case.of_rows.is_empty()) {
            let case = case.to_dtype(DType::F16, &Device::Cpu);
            emulate(Emulator::open(Mode::Plain), || case.assert_same_in_any_company());
        }
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_views_are_read_and_written() {
        emulate(Emulator::open(Mode::Asan), || assert_reads_views(&Device::Cpu));
    }
}
