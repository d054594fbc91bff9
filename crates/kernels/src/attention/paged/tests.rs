use super::*;
use crate::attention;
use crate::batch_invariance::within;
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
    same_in_pieces: bool,
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
        // A prime, so that all blocks are reached. The first and the last one are nobody's, and some others.
        let prime = (used + 3..).find(|n| *n > 7 && (2..*n).all(|d| n % d != 0)).unwrap();
        for entry in tables.iter_mut().flatten() {
            *entry = (1 + *entry as usize * 7 % prime) as u32;
        }
        let blocks = prime + 2;
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
            options: Options { scale: 0.8, softcap: None, window: None, sinks: None },
            same_in_pieces: false,
        }
    }

    fn scale(mut self, scale: f64) -> Case {
        self.options.scale = scale;
        self
    }

    fn sinks(mut self) -> Case {
        self.options.sinks = attention::tests::some_sinks(self.q.dim(1).unwrap());
        self
    }

    fn same_in_pieces(self) -> Case {
        Case { same_in_pieces: true, ..self }
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
        let (q, k, v, options) =
            (to(&self.q), to(&self.k), to(&self.v), self.options.map_sinks(to));
        Case { q, k, v, options, ..self.clone() }
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
        within(self.same_in_pieces, || {
            Sequences::new(&sequences, self.block, self.k.dim(0)?, device)
        })
    }

    fn run(&self) -> Result<Tensor> {
        let sequences = self.sequences(self.q.device())?;
        forward_paged(&self.q, &self.k, &self.v, &sequences, &self.options)
    }

    fn forward(&self) -> Tensor {
        self.run().unwrap()
    }

    /// With pools that are rounded to 8 bits, and as many numbers as their codes stand for.
    fn rounded(&self, device: &Device) -> ([RoundedPool; 2], Case) {
        let (blocks, block, kv_heads, head_dim) = self.k.dims4().unwrap();
        let pools = [0, 1].map(|_| RoundedPool::new(self.k.dims4().unwrap(), device).unwrap());
        let rows = |pool: &Tensor| {
            let rows = pool.reshape((blocks * block, kv_heads, head_dim)).unwrap();
            there(&rows, device)
        };
        let places = Tensor::arange(0, (blocks * block) as u32, &Device::Cpu).unwrap();
        let [first, second] = &pools;
        let both = [&rows(&self.k), &rows(&self.v)];
        RoundedPool::write_both([first, second], both, &there(&places, device)).unwrap();
        let [k, v] = pools.each_ref().map(|pool| {
            let numbers = Tensor::from_vec(pool.numbers(), self.k.shape(), &Device::Cpu).unwrap();
            numbers.to_dtype(self.k.dtype()).unwrap()
        });
        (pools, Case { k, v, ..self.clone() })
    }

    /// Asserts that over rounded pools attention is what it is over what their codes stand for.
    fn assert_reads_codes(&self, device: &Device) {
        let ([k, v], dense) = self.rounded(device);
        let sequences = self.sequences(device).unwrap();
        let q = there(&self.q, device);
        let options = self.options.map_sinks(|sinks| there(sinks, device));
        let o = forward_paged(&q, &k, &v, &sequences, &options).unwrap();
        let [k, v] = [&dense.k, &dense.v].map(|pool| there(pool, device));
        let expected = forward_paged(&q, &k, &v, &sequences, &options).unwrap();
        assert!(values(&here(&expected)).iter().all(|x| x.is_finite()));
        if device.is_cuda() && !self.q.dim(2).unwrap().is_multiple_of(16) {
            let tolerance = if q.dtype() == DType::F32 { 1e-5 } else { 8e-3 };
            return assert_close(&here(&o), &here(&expected), tolerance);
        }
        assert_identical(&here(&o), &here(&expected));
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
            vec![Tensor::zeros((0, heads, head_dim), self.q.dtype(), self.q.device()).unwrap()];
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
        Case::new(&[(1, 1), (3, 9), (0, 5), (1, 40)], 4, [4, 2], 7).sinks(),
        Case::new(&[(5, 9), (1, 9), (9, 9)], 16, [3, 1], 64).scale(0.125),
        Case::new(&[(1, 300), (1, 17), (150, 290), (1, 128)], 16, [6, 2], 16).scale(0.3).sinks(),
        Case::sharing(&[(1, 300), (20, 320), (1, 257), (1, 256)], 16, 16, [4, 4], 64).scale(0.125),
        Case::new(&[(2, 200), (1, 500), (1, 130)], 32, [5, 1], 80).scale(0.1).softcap(1.3).sinks(),
        Case::new(&[(1, 500), (40, 300), (200, 450)], 16, [2, 1], 96).scale(0.1).window(100),
        Case::new(&[(1, 400), (1, 1), (10, 33)], 1, [7, 1], 128).scale(0.09).window(17).sinks(),
        Case::new(&[(1, 140), (33, 140)], 3, [8, 1], 256).scale(0.06).softcap(2.0).window(70),
        Case::new(&[(1, 3000), (3, 1100)], 32, [9, 3], 64).scale(0.125).sinks(),
        Case::new(&[(130, 130), (1, 2)], 5, [4, 4], 33).scale(-0.2),
        Case::new(&[(1, 90); 20], 16, [6, 2], 32).scale(0.2),
        // Few rows, which are multiplied with keys where they lie: odd numbers of keys, heads that fill no register, more
        // than one register of them, and keys that no query sees.
        Case::new(&[(1, 1), (1, 7), (2, 131), (5, 300)], 16, [6, 2], 40)
            .scale(0.2)
            .window(70)
            .sinks(),
        Case::new(&[(1, 515), (4, 130)], 3, [4, 1], 97).scale(-0.1).softcap(2.0),
        Case::new(&[(1, 400)], 16, [16, 1], 128).scale(0.1).sinks(),
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
        Case::new(&[(150, 290)], 16, [6, 2], 16).scale(0.3).sinks(),
        Case::new(&[(200, 450)], 16, [2, 1], 64).scale(0.1).window(100),
        Case::new(&[(140, 140)], 5, [3, 3], 80).scale(0.1).softcap(1.5),
        Case::new(&[(20, 700)], 32, [9, 3], 64).scale(0.125).sinks(),
    ] {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let case = case.to_dtype(dtype).same_in_pieces();
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
fn many_queries_give_the_bits_of_a_sequence_by_itself() {
    for case in [
        Case::new(&[(150, 290), (6, 700), (128, 128)], 16, [6, 2], 16).scale(0.3),
        Case::new(&[(200, 450), (9, 1200)], 16, [2, 1], 64).scale(0.1).window(100).sinks(),
        Case::new(&[(140, 140), (17, 20)], 5, [3, 3], 80).scale(0.1).softcap(1.5),
        // With few rows, too.
        Case::new(&[(5, 700), (13, 13)], 16, [6, 2], 16).scale(0.3).same_in_pieces(),
    ] {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let case = case.to_dtype(dtype);
            assert_identical(&case.forward(), &case.by_itself());
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
fn codes_are_read_as_what_they_stand_for() {
    for case in cases().into_iter().chain(cases_of_ranges()) {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            case.to_dtype(dtype).assert_reads_codes(&Device::Cpu);
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
    let known = Sequences::new(&[more], 4, 10, &Device::Cpu).unwrap();
    assert_eq!(known.tokens(), 1);
    let apart = Tensor::zeros((known.numbers().len(), 2), DType::U32, &Device::Cpu).unwrap();
    let wrong = message(known.reading(&apart.get_on_dim(1, 0).unwrap()));
    assert!(wrong.contains("the numbers aren't contiguous"), "{wrong}");
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
    let ([k, _], dense) = case.rounded(&Device::Cpu);
    let sequences = case.sequences(&Device::Cpu).unwrap();
    let wrong = message(forward_paged(&case.q, &k, &dense.v, &sequences, &case.options));
    assert!(
        wrong.contains("one of the pools is rounded to 8 bits, expected both or none"),
        "{wrong}"
    );
}

/// What the kernels of GPUs have to tell apart: heads of all sizes, ranges of keys and their ends, windows within
/// one range and over several, few and many queries.
fn cases_of_ranges() -> Vec<Case> {
    vec![
        Case::new(&[(1, 256), (1, 257), (1, 1), (1, 2000)], 16, [8, 2], 128).scale(0.09).sinks(),
        Case::new(&[(16, 600), (17, 600), (2, 300), (1, 513)], 32, [4, 2], 64).scale(0.125),
        Case::new(&[(1, 1500), (5, 900), (40, 700)], 32, [6, 2], 128)
            .scale(0.09)
            .window(300)
            .sinks(),
        Case::new(&[(1, 700), (9, 270), (130, 200)], 16, [4, 1], 72).scale(0.1).window(20),
        Case::new(&[(1, 520), (3, 40), (70, 90)], 16, [7, 1], 256).scale(0.06).softcap(2.0).sinks(),
        Case::new(&[(1, 600), (129, 300)], 64, [3, 3], 80).scale(-0.1),
        Case::new(&[(1, 530), (20, 280)], 5, [4, 2], 64).scale(0.125).window(270).sinks(),
        Case::new(&[(1, 300), (4, 300), (30, 31)], 16, [20, 1], 96).scale(0.1),
    ]
}

#[test]
fn plans_name_every_part_of_the_work_once() {
    let cases = || cases().into_iter().chain(cases_of_ranges());
    for case in cases().chain(cases().map(Case::same_in_pieces)) {
        let sequences = case.sequences(&Device::Cpu).unwrap();
        let Plan { items, parts, .. } = sequences.plan;
        let of_kind = |kind: usize| -> Vec<(usize, usize)> {
            let pairs = &sequences.numbers()[items[kind].start..][..2 * items[kind].room];
            assert_eq!(sequences.numbers()[kind] as usize, items[kind].room);
            pairs.chunks(2).map(|pair| (pair[0] as usize, pair[1] as usize)).collect()
        };
        let mut used = 0;
        for (index, (queries, keys)) in case.sizes.iter().enumerate() {
            let of_sequence = |kind| -> Vec<usize> {
                let mut parts: Vec<_> = { of_kind(kind).into_iter() }
                    .filter(|(sequence, _)| *sequence == index)
                    .map(|(_, part)| part)
                    .collect();
                parts.sort();
                parts
            };
            let up_to = |count: usize| (0..count).collect::<Vec<_>>();
            let is_many = *queries > FEW_QUERIES && !case.same_in_pieces;
            let (ranges, few) = (keys.div_ceil(PAGED_SPLIT), *queries > 0 && !is_many);
            let (none, split) = (Vec::new(), few && *keys > SEGMENT);
            let is_single = *queries == 1;
            assert_eq!(of_sequence(SINGLE), if is_single { up_to(ranges) } else { none.clone() });
            let expected = if few && !is_single { up_to(ranges) } else { none.clone() };
            assert_eq!(of_sequence(FEW), expected);
            let tiles = if is_many { queries.div_ceil(PAGED_QUERIES) } else { 0 };
            assert_eq!(of_sequence(MANY), up_to(tiles));
            assert_eq!(of_sequence(SPLIT), if split { up_to(*queries) } else { none });
            used += if split { queries * ranges * (PAGED_SPLIT / SEGMENT) } else { 0 };
        }
        assert_eq!(parts, used);
    }
}

#[test]
fn batches_with_one_room_have_as_many_numbers() {
    let all = Case::new(&[(1, 600), (1, 700), (3, 300)], 16, [2, 1], 8);
    let with = |sizes: &[(usize, usize)]| {
        let case = Case { sizes: sizes.to_vec(), ..all.clone() };
        let sequences: Vec<_> = { case.sizes.iter().zip(&case.tables) }
            .map(|((queries, keys), table)| Sequence { queries: *queries, keys: *keys, table })
            .collect();
        Sequences::with_room(&sequences, 800, 16, all.k.dim(0).unwrap(), &Device::Cpu).unwrap()
    };
    let (long, short) = (with(&[(1, 600), (1, 700), (3, 300)]), with(&[(1, 3), (1, 257), (3, 3)]));
    assert_eq!(long.numbers().len(), short.numbers().len());
    assert_eq!(short.numbers()[..KINDS], [3, 1, 0, 1]);
    let (q, options) = (&all.q, &all.options);
    let o = forward_paged(q, &all.k, &all.v, &short, options).unwrap();
    let expected = Case { sizes: vec![(1, 3), (1, 257), (3, 3)], ..all.clone() }.forward();
    assert_identical(&o, &expected);
    let few = Tensor::new(&[1u32], &Device::Cpu).unwrap();
    let wrong = message(short.reading(&few));
    assert!(wrong.contains("numbers has shape [1]"), "{wrong}");
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::backend::cuda::Cuda;
    use crate::recording::Recording;

    impl Case {
        fn to_device(&self, device: &Device) -> Case {
            let to = |tensor: &Tensor| there(tensor, device);
            let (q, k, v, options) =
                (to(&self.q), to(&self.k), to(&self.v), self.options.map_sinks(to));
            Case { q, k, v, options, ..self.clone() }
        }
    }

    fn all_cases() -> impl Iterator<Item = Case> {
        let cases = || cases().into_iter().chain(cases_of_ranges());
        cases().chain(cases().map(Case::same_in_pieces))
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_sequences_give_what_they_give_by_themselves() {
        let device = crate::testing::cuda();
        for (index, case) in all_cases().enumerate() {
            for (dtype, tolerance) in PRECISIONS {
                eprintln!("case {index} {dtype:?}");
                let low = case.to_dtype(dtype);
                let o = low.to_device(&device).forward();
                assert_eq!(o.dtype(), dtype);
                assert_close(&here(&o), &low.expected(), tolerance);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_company_does_not_change_bits() {
        let device = crate::testing::cuda();
        for case in all_cases() {
            for (dtype, _) in PRECISIONS {
                let case = case.to_dtype(dtype).to_device(&device);
                let (together, mut first) = (here(&case.forward()), 0);
                assert_identical(&here(&case.forward()), &together);
                for (index, (queries, _)) in case.sizes.iter().enumerate() {
                    if *queries > 0 {
                        let alone = here(&case.only(&[index]).forward());
                        assert_identical(&alone, &together.narrow(0, first, *queries).unwrap());
                    }
                    first += queries;
                }
            }
        }
    }

    /// Of so many sequences that a block has many keys of one, or all, beside one whose keys are shared by more blocks.
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_many_sequences_give_the_bits_of_each_by_itself() {
        let device = crate::testing::cuda();
        let blocks = 20 * Cuda::on(&device).unwrap().multiprocessors().unwrap();
        for (heads, head_dim, longest) in [
            ([24, 1], 64, 2000),
            ([26, 2], 128, 1900),
            ([43, 1], 80, 600),
            ([61, 1], 33, 600),
            ([37, 1], 256, 700),
            ([24, 1], 64, 3000),
        ] {
            let length = |index: usize| (1 + index % 2, 200 + index * 61 % (longest - 200));
            let sizes: Vec<_> = (0..blocks / heads[0]).map(length).collect();
            let case = Case::new(&sizes, 16, heads, head_dim).scale(0.1);
            let case = if head_dim == 80 { case.window(300) } else { case };
            for (dtype, _) in PRECISIONS {
                let case = case.to_dtype(dtype).to_device(&device);
                let (together, mut first) = (here(&case.forward()), 0);
                for (index, (queries, _)) in sizes.iter().enumerate() {
                    if index % 7 == 0 {
                        let alone = here(&case.only(&[index]).forward());
                        assert_identical(&alone, &together.narrow(0, first, *queries).unwrap());
                    }
                    first += queries;
                }
            }
        }
    }

    /// Of so many sequences with one query that blocks share the keys of one, and of enough that a block has all, beside
    /// others.
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_many_single_queries_give_what_they_give_by_themselves() {
        let device = crate::testing::cuda();
        let multiprocessors = Cuda::on(&device).unwrap().multiprocessors().unwrap();
        for of_multiprocessor in [1, 3] {
            for ([heads, kv_heads], head_dim, block) in [
                ([8, 4], 128, 16),
                ([6, 2], 64, 32),
                ([4, 4], 96, 48),
                ([12, 3], 33, 5),
                ([40, 2], 120, 16),
                ([2, 2], 256, 16),
            ] {
                let count = of_multiprocessor * multiprocessors / kv_heads;
                let up_to = |longest: usize, others: &[(usize, usize)]| {
                    // Most are short, as all are computed on the CPU, too.
                    let long = |index: usize| index.is_multiple_of(16).then_some(longest);
                    let keys = |index| 1 + index * 167 % long(index).unwrap_or(40);
                    let singles = (0..count).map(|index| (1, keys(index)));
                    let sizes: Vec<_> = singles.chain(others.iter().copied()).collect();
                    Case::new(&sizes, block, [heads, kv_heads], head_dim).scale(0.1)
                };
                let ends = [(3, 700), (1, 256), (1, 512), (1, 513), (1, 1024), (1, 1025)];
                let case = up_to(1300, &ends);
                let cases = [
                    case.clone(),
                    case.clone().window(300),
                    case.softcap(1.5),
                    up_to(500, &[]),
                    up_to(500, &[(3, 400)]),
                ];
                for (index, case) in cases.iter().enumerate() {
                    let (dtype, tolerance) = PRECISIONS[2 - index % 3];
                    eprintln!("{count} of {head_dim}, case {index} {dtype:?}");
                    let low = case.to_dtype(dtype);
                    let there = low.to_device(&device);
                    let o = here(&there.forward());
                    assert_close(&o, &low.expected(), tolerance);
                    assert_identical(&here(&there.forward()), &o);
                    if index == 0 {
                        low.assert_reads_codes(&device);
                    }
                    for sequence in (0..count).step_by(16) {
                        let alone = here(&there.only(&[sequence]).forward());
                        assert_identical(&alone, &o.narrow(0, sequence, 1).unwrap());
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_pieces_give_the_same_bits() {
        let device = crate::testing::cuda();
        for case in [
            Case::new(&[(150, 690)], 16, [6, 2], 64).scale(0.125).sinks(),
            Case::new(&[(200, 850)], 16, [4, 1], 128).scale(0.09).window(300),
            Case::new(&[(40, 340)], 16, [3, 1], 256).scale(0.06).softcap(1.5).sinks(),
        ] {
            for (dtype, _) in PRECISIONS {
                let case = case.to_dtype(dtype).to_device(&device);
                let queries = case.sizes[0].0;
                let in_pieces = |step: usize| {
                    let starts = (0..queries).step_by(step);
                    let piece = |first| case.piece(0, first, queries.min(first + step)).forward();
                    let pieces: Vec<_> = starts.map(|first| here(&piece(first))).collect();
                    Tensor::cat(&pieces, 0).unwrap()
                };
                let whole = here(&case.forward());
                for step in [1, 2, 5, 8, 17, 20] {
                    assert_identical(&in_pieces(step), &whole);
                }
                if case.q.dim(2).unwrap().is_multiple_of(16) {
                    case.piece(0, 1, queries).assert_reads_codes(&device);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_batch_invariance_gives_the_bits_of_a_sequence_by_itself() {
        let device = crate::testing::cuda();
        for case in [
            Case::new(&[(150, 690), (1, 700), (6, 20), (256, 256)], 16, [6, 2], 64).scale(0.125),
            Case::new(&[(200, 850), (1, 1), (40, 600)], 16, [4, 1], 128)
                .scale(0.09)
                .window(300)
                .sinks(),
            Case::new(&[(333, 9500)], 32, [2, 2], 104).scale(0.1).window(9000),
            Case::new(&[(40, 340), (3, 3)], 16, [3, 1], 256).scale(0.06).softcap(1.5),
            Case::new(&[(70, 600)], 16, [4, 4], 33).scale(-0.2).sinks(),
            Case::new(&[(1100, 1400)], 16, [8, 2], 128).scale(0.09).window(700),
            Case::new(&[(900, 1400), (40, 50)], 16, [12, 4], 64).scale(0.125).softcap(1.5),
            Case::new(&[(2700, 8200)], 32, [16, 4], 96).scale(0.1),
        ] {
            for (dtype, _) in PRECISIONS {
                let case = case.to_dtype(dtype).to_device(&device).same_in_pieces();
                let expected = here(&case.forward());
                assert_identical(&here(&within(true, || case.by_itself())), &expected);
                // Few queries of a sequence have kernels of their own.
                let queries = case.sizes[0].0;
                for first in [0, queries - 3] {
                    let piece = here(&case.piece(0, first, first + 3).forward());
                    assert_identical(&piece, &expected.narrow(0, first, 3).unwrap());
                }
                if case.q.dim(2).unwrap().is_multiple_of(16) {
                    case.assert_reads_codes(&device);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_codes_are_read_as_what_they_stand_for() {
        let device = crate::testing::cuda();
        for case in all_cases() {
            for (dtype, _) in PRECISIONS {
                case.to_dtype(dtype).assert_reads_codes(&device);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_reads_views_of_queries() {
        let device = crate::testing::cuda();
        for d in [64, 9] {
            for (dtype, _) in PRECISIONS {
                let case = Case::new(&[(1, 20), (30, 70), (3, 33)], 16, [4, 2], d).to_dtype(dtype);
                let case = case.to_device(&device);
                let expected = here(&case.forward());
                let fused = Tensor::cat(&[&case.q, &case.q, &case.q], 1).unwrap();
                let wide = Tensor::cat(&[&case.q.narrow(2, 0, 1).unwrap(), &case.q], 2).unwrap();
                for q in [fused.narrow(1, 4, 4).unwrap(), wide.narrow(2, 1, d).unwrap()] {
                    assert_identical(&here(&Case { q, ..case.clone() }.forward()), &expected);
                }
            }
        }
    }

    /// Room for 800 keys; sequences of so many.
    fn sequences_of(case: &Case, keys: &[usize], device: &Device) -> Sequences {
        let sequences: Vec<_> = { keys.iter().zip(&case.tables) }
            .map(|(keys, table)| Sequence { queries: 1, keys: *keys, table })
            .collect();
        let blocks = case.k.dim(0).unwrap();
        Sequences::with_room(&sequences, 800, case.block, blocks, device).unwrap()
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_decoding_is_recorded_once_for_batches_with_one_room() {
        let device = crate::testing::cuda();
        let multiprocessors = Cuda::on(&device).unwrap().multiprocessors().unwrap();
        // So few that blocks share the keys of a sequence, and so many that a block has all.
        let counts = [5, multiprocessors];
        for (dtype, count) in
            PRECISIONS.into_iter().flat_map(|(dtype, _)| counts.map(|count| (dtype, count)))
        {
            let sizes = vec![(1, 800); count];
            let case = Case::new(&sizes, 16, [8, 2], 64).scale(0.125).window(500);
            let mut case = case.to_dtype(dtype).to_device(&device);
            // No holes: other batches have fewer keys.
            case.tables = Case::new(&sizes, 16, [8, 2], 64).tables;
            let batches = [[800, 300, 1, 257, 512], [1, 2, 3, 4, 5], [256, 700, 799, 800, 13]];
            let batches =
                batches.map(|keys| keys.into_iter().cycle().take(count).collect::<Vec<usize>>());
            let first = sequences_of(&case, &batches[0], &device);
            let run = |sequences: &Sequences| {
                forward_paged(&case.q, &case.k, &case.v, sequences, &case.options)
            };
            let mut recording =
                Recording::new(&device, first.numbers(), |numbers| run(&first.reading(numbers)?))
                    .unwrap();
            assert_identical(&here(recording.output()), &here(&run(&first).unwrap()));
            for keys in &batches {
                let sequences = sequences_of(&case, keys, &device);
                recording.run(sequences.numbers()).unwrap();
                assert_identical(&here(recording.output()), &here(&run(&sequences).unwrap()));
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_reads_nothing_beyond_the_pools() {
        let device = crate::testing::cuda();
        for (dtype, _) in PRECISIONS {
            for sizes in [[(1, 600), (1, 40)], [(5, 600), (3, 40)], [(150, 600), (40, 40)]] {
                let mut case = Case::new(&sizes, 16, [4, 2], 64).scale(0.125);
                // It may read blocks that are another's, which have to be numbers here.
                for pool in [&mut case.k, &mut case.v] {
                    let numbers =
                        values(pool).into_iter().map(|x| if x.is_nan() { 0.0 } else { x });
                    let numbers: Vec<f64> = numbers.collect();
                    *pool = Tensor::from_vec(numbers, pool.shape(), &Device::Cpu).unwrap();
                }
                let case = case.to_dtype(dtype).to_device(&device);
                let sequences = case.sequences(&device).unwrap();
                let mut numbers = sequences.numbers().to_vec();
                let tables = sequences.plan.tables..sequences.plan.tables + 2 * sequences.width;
                for (index, entry) in numbers[tables].iter_mut().enumerate() {
                    if index % 3 == 1 {
                        *entry = [u32::MAX, 1 << 31, case.k.dim(0).unwrap() as u32][index % 2];
                    }
                }
                let numbers = Tensor::new(numbers, &device).unwrap();
                let sequences = sequences.reading(&numbers).unwrap();
                let o = forward_paged(&case.q, &case.k, &case.v, &sequences, &case.options);
                assert!(values(&here(&o.unwrap())).iter().all(|value| value.is_finite()));
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_handles_empty_batches_and_long_heads() {
        let device = crate::testing::cuda();
        let sizes = [(5, 20), (0, 7), (1, 33), (40, 50)];
        let long = Case::new(&sizes, 4, [4, 2], 264).scale(0.06);
        for case in [long.clone(), long.window(9)] {
            for (dtype, tolerance) in PRECISIONS {
                let low = case.to_dtype(dtype);
                let found = here(&low.to_device(&device).forward());
                assert_close(&found, &low.expected(), tolerance);
            }
            let case = case.to_dtype(DType::F32).to_device(&device);
            let sequences = case.sequences(&device).unwrap();
            let recorded = Recording::new(&device, sequences.numbers(), |numbers| {
                let sequences = sequences.reading(numbers)?;
                forward_paged(&case.q, &case.k, &case.v, &sequences, &case.options)
            });
            let wrong = message::<Recording>(recorded);
            assert!(wrong.contains("heads above 256 cannot be recorded"), "{wrong}");
        }
        let pool = || RoundedPool::new((4, 4, 1, 288), &device).unwrap();
        let case = Case::new(&[(1, 5)], 4, [2, 1], 288).to_dtype(DType::F32).to_device(&device);
        let sequence = Sequence { queries: 1, keys: 5, table: &[0, 1] };
        let sequences = Sequences::new(&[sequence], 4, 4, &device).unwrap();
        let wrong = forward_paged(&case.q, &pool(), &pool(), &sequences, &case.options);
        let wrong = message(wrong);
        assert!(wrong.contains("heads of 288 elements are too long for CUDA"), "{wrong}");
        let case = Case::new(&[(0, 5), (0, 0)], 4, [2, 1], 8).to_dtype(DType::F32);
        assert_eq!(case.to_device(&device).forward().dims(), [0, 2, 8]);
    }

    #[test]
    #[ignore = "measures an NVIDIA GPU"]
    fn cuda_speed() {
        const COPIES: usize = 4;
        let device = crate::testing::cuda();
        let ([heads, kv_heads], d, block) = ([32, 8], 128, 32);
        for (count, queries, keys) in [
            (1usize, 1usize, 1000usize),
            (1, 1, 8000),
            (1, 1, 32000),
            (8, 1, 8000),
            (64, 1, 320),
            (64, 1, 1000),
            (256, 1, 320),
            (256, 1, 1000),
            (1000, 1, 300),
            (32, 4, 1000),
            (1, 512, 512),
            (8, 512, 512),
            (1, 512, 4096),
            (1, 4096, 4096),
        ] {
            let width = keys.div_ceil(block);
            let blocks = count * width;
            let pool = || {
                let shape = (blocks, block, kv_heads, d);
                Tensor::ones(shape, DType::BF16, &device).unwrap()
            };
            // More than the cache holds.
            let pools: Vec<_> = (0..COPIES).map(|_| (pool(), pool())).collect();
            let rounded = || RoundedPool::new((blocks, block, kv_heads, d), &device).unwrap();
            let in_codes: Vec<_> = (0..COPIES).map(|_| (rounded(), rounded())).collect();
            let q = Tensor::ones((count * queries, heads, d), DType::BF16, &device).unwrap();
            // In no order.
            let stride =
                (blocks * 5 / 8..).find(|n| (2..=blocks).all(|d| blocks % d > 0 || n % d > 0));
            let stride = stride.unwrap();
            let entries: Vec<_> =
                (0..blocks).map(|index| (index * stride % blocks) as u32).collect();
            let sequences: Vec<_> =
                entries.chunks(width).map(|table| Sequence { queries, keys, table }).collect();
            let of_any = Sequences::new(&sequences, block, blocks, &device).unwrap();
            let options = Options { scale: 0.09, softcap: None, window: None, sinks: None };
            let time = |run: &dyn Fn(usize)| {
                let seconds = least_seconds(&device, 8, || {
                    for _ in 0..4 {
                        (0..COPIES).for_each(run);
                    }
                });
                seconds / (4 * COPIES) as f64
            };
            let paged = time(&|copy| {
                let (k, v) = &pools[copy];
                drop(forward_paged(&q, k, v, &of_any, &options).unwrap());
            });
            let of_codes = time(&|copy| {
                let (k, v) = &in_codes[copy];
                drop(forward_paged(&q, k, v, &of_any, &options).unwrap());
            });
            let sequences =
                within(true, || Sequences::new(&sequences, block, blocks, &device)).unwrap();
            let invariant = time(&|copy| {
                let (k, v) = &pools[copy];
                drop(forward_paged(&q, k, v, &sequences, &options).unwrap());
            });
            let q = q.reshape((count, queries, heads, d)).unwrap();
            let by_itself = |copy: usize| {
                let of = |pool: &Tensor| {
                    let pool = pool.reshape((count, width * block, kv_heads, d)).unwrap();
                    pool.narrow(1, 0, keys).unwrap()
                };
                let (k, v) = &pools[copy];
                drop(attention::forward(&q, &of(k), &of(v), None, &options).unwrap());
            };
            let invariant_by_itself = within(true, || time(&by_itself));
            let by_itself = time(&by_itself);
            let bytes = (4 * count * keys * kv_heads * d) as f64;
            println!(
                "{count} x {queries} of {keys}: paged {:.1} us {:.0} GB/s, in 8 bits {:.1} us {:.0} GB/s, contiguous {:.1} us {:.0} GB/s, batch invariant: paged {:.1} us, contiguous {:.1} us",
                paged * 1e6,
                bytes / paged / 1e9,
                of_codes * 1e6,
                bytes * 33.0 / 64.0 / of_codes / 1e9,
                by_itself * 1e6,
                bytes / by_itself / 1e9,
                invariant * 1e6,
                invariant_by_itself * 1e6
            );
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

    /// Asserts that every sequence gives what it gives by itself, in every mode and several orders of threads,
    /// and the same bits alone; with one, two or all simdgroups. Dtypes take turns.
    fn assert_right_everywhere(cases: &[Case]) {
        for mode in Mode::ALL {
            let emulator = Emulator::open(mode);
            for (index, case) in cases.iter().enumerate() {
                for (seed, most_threads) in SEEDS.into_iter().zip([33, 1024, 90]) {
                    let emulator = Emulator { seed, most_threads, ..emulator.clone() };
                    let (dtype, tolerance) = PRECISIONS[(index + seed as usize) % PRECISIONS.len()];
                    let case = case.to_dtype(dtype);
                    let o = emulate(emulator.clone(), || case.forward());
                    assert_eq!(o.dtype(), dtype);
                    eprintln!("{mode} {dtype:?} {:?}", case.sizes);
                    assert_close(&o, &case.expected(), tolerance);
                    if mode != Mode::Plain || seed != 1 {
                        continue;
                    }
                    let mut first = 0;
                    for (index, (queries, _)) in case.sizes.iter().enumerate() {
                        let alone = case.only(&[index]);
                        let found = emulate(emulator.clone(), || alone.forward());
                        assert_identical(&found, &o.narrow(0, first, *queries).unwrap());
                        first += queries;
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_sequences_give_what_they_give_by_themselves() {
        assert_right_everywhere(&[
            Case::new(&[(1, 1), (3, 9), (0, 5), (1, 40)], 4, [4, 2], 7).sinks(),
            Case::new(&[(1, 300), (20, 40), (1, 257), (2, 270)], 16, [6, 2], 16).scale(0.3),
            Case::sharing(&[(1, 40), (18, 35), (1, 33)], 2, 16, [2, 2], 64).scale(0.125),
            Case::new(&[(1, 290), (17, 60)], 16, [3, 1], 96).scale(0.1).window(20),
            Case::new(&[(40, 300), (1, 4)], 16, [4, 2], 64).scale(0.1).same_in_pieces(),
        ]);
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_sequences_of_long_heads_give_what_they_give_by_themselves() {
        assert_right_everywhere(&[
            Case::new(&[(1, 530), (4, 20)], 32, [5, 1], 80).scale(0.1).softcap(1.3).window(270),
            Case::new(&[(1, 35), (19, 19)], 1, [9, 1], 128).scale(0.09),
            Case::new(&[(2, 20), (18, 33)], 3, [2, 1], 256).scale(0.06).softcap(2.0).window(7),
        ]);
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_codes_are_read_as_what_they_stand_for() {
        for mode in Mode::ALL {
            let emulator = Emulator::open(mode);
            for case in [
                Case::new(&[(1, 1), (3, 9), (0, 5), (1, 40)], 4, [4, 2], 7).sinks(),
                Case::new(&[(1, 300), (20, 40), (2, 270)], 16, [6, 2], 64).scale(0.3),
                Case::new(&[(1, 290), (17, 60)], 16, [3, 1], 96).scale(0.1).window(20),
                Case::new(&[(2, 20), (18, 33)], 3, [2, 1], 256).scale(0.06).softcap(2.0).window(7),
            ] {
                for (dtype, _) in PRECISIONS {
                    let case = case.to_dtype(dtype);
                    emulate(emulator.clone(), || case.assert_reads_codes(&Device::Cpu));
                }
            }
        }
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_pieces_give_the_same_bits() {
        let emulator = Emulator::open(Mode::Plain);
        for (case, sizes) in [
            (Case::new(&[(12, 290)], 16, [6, 2], 16).scale(0.3).window(50), [1, 5]),
            (Case::new(&[(60, 90)], 16, [2, 1], 64).scale(0.1).window(25), [20, 30]),
            (Case::new(&[(40, 290)], 16, [6, 2], 16).scale(0.3).same_in_pieces(), [3, 25]),
        ] {
            for (dtype, _) in PRECISIONS {
                let case = case.to_dtype(dtype);
                let whole = emulate(emulator.clone(), || case.forward());
                for step in sizes {
                    for first in (0..case.sizes[0].0).step_by(step) {
                        let end = (first + step).min(case.sizes[0].0);
                        let piece = case.piece(0, first, end);
                        let piece = emulate(emulator.clone(), || piece.forward());
                        assert_identical(&piece, &whole.narrow(0, first, end - first).unwrap());
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_batch_invariance_gives_the_bits_of_a_sequence_by_itself() {
        let emulator = Emulator::open(Mode::Plain);
        for case in [
            Case::new(&[(30, 290), (1, 5), (9, 270)], 16, [6, 2], 16).scale(0.3),
            Case::new(&[(40, 600)], 3, [2, 1], 64).scale(0.1).window(300).softcap(1.5),
            Case::new(&[(20, 20)], 16, [4, 1], 130).scale(0.1),
        ] {
            for (dtype, _) in PRECISIONS {
                let case = case.to_dtype(dtype).same_in_pieces();
                emulate(emulator.clone(), || {
                    within(true, || assert_identical(&case.by_itself(), &case.forward()));
                });
            }
        }
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_reads_views_and_nothing_beyond_the_pools() {
        let emulator = Emulator::open(Mode::Asan);
        for (dtype, _) in PRECISIONS {
            let case = Case::new(&[(1, 20), (20, 30), (3, 33)], 16, [4, 2], 9).to_dtype(dtype);
            let expected = emulate(emulator.clone(), || case.forward());
            let fused = Tensor::cat(&[&case.q, &case.q, &case.q], 1).unwrap();
            for q in [fused.narrow(1, 4, 4).unwrap(), strided(&case.q)] {
                let other = Case { q, ..case.clone() };
                assert_identical(&emulate(emulator.clone(), || other.forward()), &expected);
            }
            let sequences = case.sequences(&Device::Cpu).unwrap();
            let mut numbers = sequences.numbers().to_vec();
            let tables = sequences.plan.tables..sequences.plan.tables + 3 * sequences.width;
            numbers[tables].fill(u32::MAX);
            let numbers = Tensor::new(numbers, &Device::Cpu).unwrap();
            let sequences = sequences.reading(&numbers).unwrap();
            emulate(emulator.clone(), || {
                forward_paged(&case.q, &case.k, &case.v, &sequences, &case.options).unwrap()
            });
        }
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_handles_empty_batches_and_refuses_long_heads() {
        let emulator = Emulator::open(Mode::Asan);
        let case = Case::new(&[(1, 5)], 4, [2, 1], 257).to_dtype(DType::F32);
        let wrong = message(emulate(emulator.clone(), || case.run()));
        assert!(wrong.contains("heads of 257 elements are too long for Metal"), "{wrong}");
        let case = Case::new(&[(0, 5), (0, 0)], 4, [2, 1], 8).to_dtype(DType::F32);
        assert_eq!(emulate(emulator, || case.forward()).dims(), [0, 2, 8]);
    }
}
