use super::*;
use crate::attention;
use crate::testing::*;
use candle_core::DType;

/// Sequences with their keys and values, as the pools have them and by themselves.
#[derive(Clone)]
struct Case {
    /// Queries and keys of each sequence.
    sizes: Vec<(usize, usize)>,
    tables: Vec<Vec<u32>>,
    block: usize,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
}

impl Case {
    /// Blocks in no order, and NaN wherever no token is.
    fn new(sizes: &[(usize, usize)], block: usize, heads: [usize; 2], head_dim: usize) -> Case {
        Case::sharing(sizes, 0, block, heads, head_dim)
    }

    /// The first `shared` blocks are those of the first sequence.
    fn sharing(
        sizes: &[(usize, usize)],
        shared: usize,
        block: usize,
        [heads, kv_heads]: [usize; 2],
        head_dim: usize,
    ) -> Case {
        let needed = |keys: usize| keys.div_ceil(block);
        let mut tables: Vec<Vec<u32>> = Vec::new();
        let mut used = 0;
        for (_, keys) in sizes {
            let mut table: Vec<u32> = tables.first().cloned().unwrap_or_default();
            table.truncate(shared.min(keys / block));
            let own = needed(*keys) - table.len();
            table.extend(used as u32..(used + own) as u32);
            used += own;
            tables.push(table);
        }
        // A prime, so that all blocks are reached; some aren't used.
        let blocks = (used + 3..).find(|n| *n > 7 && (2..*n).all(|d| n % d != 0)).unwrap();
        for entry in tables.iter_mut().flatten() {
            *entry = (*entry as usize * 7 % blocks) as u32;
        }
        let row = kv_heads * head_dim;
        let pool = |seed| {
            let numbers = values(&random(&[blocks, block, row], seed));
            let mut pool = vec![f64::NAN; blocks * block * row];
            for ((_, keys), table) in sizes.iter().zip(&tables) {
                for key in 0..*keys {
                    let start = (table[key / block] as usize * block + key % block) * row;
                    pool[start..start + row].copy_from_slice(&numbers[start..start + row]);
                }
            }
            Tensor::from_vec(pool, (blocks, block, kv_heads, head_dim), &Device::Cpu).unwrap()
        };
        let tokens = sizes.iter().map(|(queries, _)| queries).sum();
        let (k, v) = (pool(2), pool(3));
        Case {
            sizes: sizes.to_vec(),
            tables,
            block,
            q: random(&[tokens, heads, head_dim], 1),
            k,
            v,
            options: Options { scale: 0.8, softcap: None, window: None },
        }
    }

    fn scale(mut self, scale: f64) -> Case {
        self.options.scale = scale;
        self
    }

    fn softcap(mut self, softcap: f64) -> Case {
        self.options.softcap = Some(softcap);
        self
    }

    /// With a hole for every block that is behind it.
    fn window(mut self, window: usize) -> Case {
        self.options.window = Some(window);
        for ((queries, keys), table) in self.sizes.iter().zip(&mut self.tables) {
            let lowest = (keys - queries + 1).saturating_sub(window);
            table[..lowest / self.block].fill(HOLE);
        }
        self
    }

    fn to_dtype(&self, dtype: DType) -> Case {
        let to = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
        Case { q: to(&self.q), k: to(&self.k), v: to(&self.v), ..self.clone() }
    }

    /// Some of the sequences by themselves, with the same pools.
    fn only(&self, which: &[usize]) -> Case {
        let first = |index: usize| self.sizes[..index].iter().map(|(queries, _)| queries).sum();
        let q: Vec<_> =
            which.iter().map(|i| self.q.narrow(0, first(*i), self.sizes[*i].0).unwrap()).collect();
        Case {
            sizes: which.iter().map(|i| self.sizes[*i]).collect(),
            tables: which.iter().map(|i| self.tables[*i].clone()).collect(),
            q: Tensor::cat(&q, 0).unwrap(),
            ..self.clone()
        }
    }

    fn sequences(&self, device: &Device) -> Result<Sequences> {
        let sequences: Vec<_> = { self.sizes.iter().zip(&self.tables) }
            .map(|((queries, keys), table)| Sequence { queries: *queries, keys: *keys, table })
            .collect();
        Sequences::new(&sequences, self.block, self.k.dim(0)?, device)
    }

    fn run(&self) -> Result<Tensor> {
        let sequences = self.sequences(self.q.device())?;
        forward_paged(&self.q, &self.k, &self.v, &sequences, &self.options)
    }

    fn forward(&self) -> Tensor {
        self.run().unwrap()
    }

    /// Query `first` up to `end` of a sequence.
    fn piece(&self, sequence: usize, first: usize, end: usize) -> Case {
        let mut case = self.only(&[sequence]);
        let (queries, keys) = self.sizes[sequence];
        case.q = case.q.narrow(0, first, end - first).unwrap();
        case.sizes = vec![(end - first, keys - queries + end)];
        case
    }

    /// The keys or values of a sequence, one after the other; zeros in holes.
    fn gathered(&self, pool: &Tensor, sequence: usize) -> Tensor {
        let (_, keys) = self.sizes[sequence];
        let blocks: Vec<_> = self.tables[sequence]
            .iter()
            .map(|entry| match *entry {
                HOLE => pool.get(0).unwrap().zeros_like().unwrap(),
                entry => pool.get(entry as usize).unwrap(),
            })
            .collect();
        let all = Tensor::cat(&blocks, 0).unwrap().narrow(0, 0, keys).unwrap();
        all.unsqueeze(0).unwrap()
    }

    /// Every sequence by [`attention::forward`].
    fn by_itself(&self) -> Tensor {
        let (_, heads, head_dim) = self.q.dims3().unwrap();
        let mut first = 0;
        let mut all =
            vec![Tensor::zeros((0, heads, head_dim), self.q.dtype(), &Device::Cpu).unwrap()];
        for (index, (queries, _)) in self.sizes.iter().enumerate() {
            let q = self.q.narrow(0, first, *queries).unwrap().unsqueeze(0).unwrap();
            let (k, v) = (self.gathered(&self.k, index), self.gathered(&self.v, index));
            let (o, _) = attention::forward(&q, &k, &v, None, &self.options).unwrap();
            all.push(o.squeeze(0).unwrap());
            first += queries;
        }
        Tensor::cat(&all, 0).unwrap()
    }

    fn expected(&self) -> Tensor {
        self.to_dtype(DType::F64).by_itself()
    }
}

/// Prefill pieces and single tokens, few and many, of all kinds of heads and blocks.
fn cases() -> Vec<Case> {
    vec![
        Case::new(&[(1, 1)], 1, [1, 1], 1),
        Case::new(&[(1, 1), (3, 9), (0, 5), (1, 40)], 4, [4, 2], 7),
        Case::new(&[(5, 9), (1, 9), (9, 9)], 16, [3, 1], 64).scale(0.125),
        Case::new(&[(1, 300), (1, 17), (150, 290), (1, 128)], 16, [6, 2], 16).scale(0.3),
        Case::sharing(&[(1, 300), (20, 320), (1, 257), (1, 256)], 16, 16, [4, 4], 64).scale(0.125),
        Case::new(&[(2, 200), (1, 500), (1, 130)], 32, [5, 1], 80).scale(0.1).softcap(1.3),
        Case::new(&[(1, 500), (40, 300), (200, 450)], 16, [2, 1], 96).scale(0.1).window(100),
        Case::new(&[(1, 400), (1, 1), (10, 33)], 1, [7, 1], 128).scale(0.09).window(17),
        Case::new(&[(1, 140), (33, 140)], 3, [8, 1], 256).scale(0.06).softcap(2.0).window(70),
        Case::new(&[(1, 3000), (3, 1100)], 32, [9, 3], 64).scale(0.125),
        Case::new(&[(130, 130), (1, 2)], 5, [4, 4], 33).scale(-0.2),
        Case::new(&[(1, 90); 20], 16, [6, 2], 32).scale(0.2),
    ]
}

#[test]
fn every_sequence_gives_what_it_gives_by_itself() {
    for (index, case) in cases().into_iter().enumerate() {
        eprintln!("case {index}");
        assert_close(&case.forward(), &case.expected(), 1e-13);
        for (dtype, tolerance) in PRECISIONS {
            let low = case.to_dtype(dtype);
            let o = low.forward();
            assert_eq!(o.dtype(), dtype);
            assert_close(&o, &low.expected(), tolerance);
        }
    }
}

#[test]
fn company_does_not_change_bits() {
    for case in cases() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let case = case.to_dtype(dtype);
            let (together, mut first) = (case.forward(), 0);
            for (index, (queries, _)) in case.sizes.iter().enumerate() {
                let alone = case.only(&[index]).forward();
                assert_identical(&alone, &together.narrow(0, first, *queries).unwrap());
                first += queries;
            }
            let order: Vec<_> = (0..case.sizes.len()).rev().collect();
            let mut reversed = case.only(&order);
            // Other blocks, too.
            let blocks = case.k.dim(0).unwrap() as u32;
            for entry in reversed.tables.iter_mut().flatten().filter(|entry| **entry != HOLE) {
                *entry = blocks - 1 - *entry;
            }
            let order: Vec<_> = (0..blocks).rev().collect();
            let order = Tensor::from_vec(order, blocks as usize, &Device::Cpu).unwrap();
            reversed.k = reversed.k.index_select(&order, 0).unwrap();
            reversed.v = reversed.v.index_select(&order, 0).unwrap();
            let reversed = reversed.forward();
            let mut end = together.dim(0).unwrap();
            first = 0;
            for (queries, _) in case.sizes.iter().rev() {
                end -= queries;
                let expected = together.narrow(0, end, *queries).unwrap();
                assert_identical(&reversed.narrow(0, first, *queries).unwrap(), &expected);
                first += queries;
            }
        }
    }
}

#[test]
fn pieces_of_any_size_give_the_same_bits() {
    for case in [
        Case::new(&[(150, 290)], 16, [6, 2], 16).scale(0.3),
        Case::new(&[(200, 450)], 16, [2, 1], 64).scale(0.1).window(100),
        Case::new(&[(140, 140)], 5, [3, 3], 80).scale(0.1).softcap(1.5),
        Case::new(&[(20, 700)], 32, [9, 3], 64).scale(0.125),
    ] {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let case = case.to_dtype(dtype);
            let (whole, (queries, _)) = (case.forward(), case.sizes[0]);
            for step in [1, 3, 7, 64, 100] {
                for first in (0..queries).step_by(step) {
                    let end = (first + step).min(queries);
                    let piece = case.piece(0, first, end).forward();
                    assert_identical(&piece, &whole.narrow(0, first, end - first).unwrap());
                }
            }
        }
    }
}

#[test]
fn threads_do_not_change_bits() {
    for case in cases() {
        for dtype in [DType::F32, DType::BF16] {
            let case = case.to_dtype(dtype);
            assert_independent_of_threads(|| vec![case.forward()]);
        }
    }
}

#[test]
fn views_give_the_same_as_copies() {
    let case = Case::new(&[(1, 20), (30, 70), (1, 33)], 16, [4, 2], 8);
    let expected = case.forward();
    let fused = Tensor::cat(&[&case.q, &case.q, &case.q], 1).unwrap();
    let of_fused = fused.narrow(1, 4, 4).unwrap();
    let heads_first = case.q.transpose(0, 1).unwrap().contiguous().unwrap();
    let heads_first = heads_first.transpose(0, 1).unwrap();
    for q in [of_fused, heads_first, strided(&case.q)] {
        assert_identical(&Case { q, ..case.clone() }.forward(), &expected);
    }
    // Pools of one layer of several.
    let of_layers = |pool: &Tensor| {
        let all = Tensor::stack(&[pool, pool], 0).unwrap();
        all.narrow(0, 1, 1).unwrap().squeeze(0).unwrap()
    };
    let layer = Case { k: of_layers(&case.k), v: of_layers(&case.v), ..case.clone() };
    assert_identical(&layer.forward(), &expected);
}

#[test]
fn large_scores_do_not_overflow() {
    let case = Case::new(&[(1, 200), (30, 300)], 16, [2, 1], 16).scale(1000.0);
    let o = case.to_dtype(DType::F32).forward();
    assert!(values(&o).iter().all(|value| value.is_finite()));
}

#[test]
fn empty_batches_and_heads_are_handled() {
    for case in [
        Case::new(&[], 4, [2, 1], 8),
        Case::new(&[(0, 5), (0, 0)], 4, [2, 1], 8),
        Case::new(&[(1, 5)], 4, [2, 1], 0),
        Case::new(&[(1, 5)], 4, [0, 1], 8),
    ] {
        assert_eq!(case.forward().dims(), case.q.dims());
    }
}

#[test]
fn wrong_sequences_are_errors() {
    let sequences = |queries, keys, table: &[u32]| {
        message(Sequences::new(&[Sequence { queries, keys, table }], 4, 10, &Device::Cpu))
    };
    let wrong = sequences(4, 3, &[0]);
    assert!(wrong.contains("sequence 0 has 4 queries but only 3 keys"), "{wrong}");
    let wrong = sequences(1, 9, &[0, 1]);
    assert!(wrong.contains("has 2 entries, expected 3 for 9 keys in blocks of 4"), "{wrong}");
    let wrong = sequences(1, 9, &[0, 10, 1]);
    assert!(wrong.contains("names block 10, expected less than 10, or HOLE"), "{wrong}");
    let wrong = message(Sequences::new(&[], 0, 10, &Device::Cpu));
    assert!(wrong.contains("a block has 0 tokens"), "{wrong}");
    // What isn't needed isn't read.
    let more = Sequence { queries: 1, keys: 4, table: &[3, 99] };
    assert_eq!(Sequences::new(&[more], 4, 10, &Device::Cpu).unwrap().tokens(), 1);
}

#[test]
fn holes_that_a_query_sees_are_errors() {
    // The queries stand at 8 and 9, and keys before 4 are gone.
    let mut case = Case::new(&[(1, 3), (2, 10)], 4, [2, 1], 8);
    case.tables[1][0] = HOLE;
    let wrong = message(case.run());
    assert!(wrong.contains("with no window, queries of sequence 1 see a block"), "{wrong}");
    assert!(wrong.contains("expected a window of 5 keys at most"), "{wrong}");
    for (window, fits) in [(4, true), (5, true), (6, false)] {
        case.options.window = Some(window);
        assert_eq!(case.run().is_ok(), fits);
    }
    case.tables[1][2] = HOLE;
    case.options.window = Some(1);
    assert!(message(case.run()).contains("with a window of 1, queries of sequence 1 see a block"));
    // Without queries, nothing is seen.
    case.sizes[1].0 = 0;
    case.q = case.q.narrow(0, 0, 1).unwrap();
    assert!(case.run().is_ok());
}

#[test]
fn wrong_arguments_are_errors() {
    let run = |case: &Case| message(case.run());
    let case = Case::new(&[(1, 3), (2, 10)], 4, [4, 2], 8);
    let other = Case::new(&[(1, 3), (3, 10)], 4, [4, 2], 8);
    assert!(run(&Case { q: other.q, ..case.clone() }).contains("q has shape [4, 4, 8]"));
    let half = case.v.to_dtype(DType::F16).unwrap();
    assert!(run(&Case { v: half, ..case.clone() }).contains("v is F16, expected F64"));
    let wrong = run(&Case { v: case.v.narrow(3, 0, 4).unwrap(), ..case.clone() });
    assert!(wrong.contains("v has shape"), "{wrong}");
    let twice = Tensor::cat(&[&case.k, &case.k], 3).unwrap();
    let wrong = run(&Case { k: twice.narrow(3, 0, 8).unwrap(), ..case.clone() });
    assert!(wrong.contains("k is not contiguous"), "{wrong}");
    let wrong = run(&Case { q: case.q.narrow(1, 0, 3).unwrap(), ..case.clone() });
    assert!(wrong.contains("q has 3 heads and k has 2"), "{wrong}");
    assert!(run(&case.clone().softcap(0.0)).contains("softcap is 0"));
    let mut windowless = case.clone();
    windowless.options.window = Some(0);
    assert!(run(&windowless).contains("window is 0"));
}
