use super::{NewTokens, forward_paged_new};
use crate::attention::tests::some_sinks;
use crate::attention::{Options, Sequence, Sequences, forward_paged};
use crate::copy::{NOWHERE, write_rows_both};
use crate::rope;
use crate::testing::*;
use candle_core::{DType, Device, Result, Tensor};

/// A new token of each of some sequences, the last of which nobody reads if there are several.
struct Case {
    /// Keys of each sequence, with the new one.
    keys: Vec<usize>,
    block: usize,
    blocks: usize,
    tables: Vec<Vec<u32>>,
    /// q, k and v `(tokens, 1, heads, head_dim)`.
    rows: [Tensor; 3],
    /// `(tokens, 1, half)`
    angles: [Tensor; 2],
    places: Tensor,
    pools: [Tensor; 2],
    options: Options,
}

impl Case {
    fn new(
        keys: &[usize],
        block: usize,
        [heads, kv_heads]: [usize; 2],
        head_dim: usize,
        half: usize,
    ) -> Case {
        let mut blocks = 1;
        let table = |keys: &usize| {
            let table: Vec<u32> =
                (blocks..blocks + keys.div_ceil(block)).map(|it| it as u32).collect();
            blocks += table.len();
            // In no order.
            table.into_iter().rev().collect::<Vec<_>>()
        };
        let tables: Vec<Vec<u32>> = keys.iter().map(table).collect();
        let mut places: Vec<u32> = keys
            .iter()
            .zip(&tables)
            .map(|(keys, table)| {
                table[(keys - 1) / block] * block as u32 + ((keys - 1) % block) as u32
            })
            .collect();
        if let [_, .., last] = &mut places[..] {
            *last = NOWHERE;
        }
        let tokens = keys.len();
        // Parts of wider rows, as of a fused projection.
        let fused = random(&[tokens, 1, (heads + 2 * kv_heads) * head_dim], 1);
        let part = |first: usize, heads: usize| {
            let part = fused.narrow(2, first * head_dim, heads * head_dim).unwrap();
            part.reshape((tokens, 1, heads, head_dim)).unwrap()
        };
        let angle = |seed| random(&[tokens, 1, half], seed);
        let shape = [blocks, block, kv_heads, head_dim];
        Case {
            keys: keys.to_vec(),
            block,
            blocks,
            tables,
            rows: [part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads)],
            angles: [angle(2).cos().unwrap(), angle(2).sin().unwrap()],
            places: Tensor::new(places, &Device::Cpu).unwrap(),
            pools: [random(&shape, 3), random(&shape, 4)],
            options: Options { scale: 0.3, softcap: None, window: None, sinks: None },
        }
    }

    fn options(self, softcap: Option<f64>, window: Option<usize>) -> Case {
        Case { options: Options { softcap, window, ..self.options }, ..self }
    }

    fn sinks(mut self) -> Case {
        self.options.sinks = some_sinks(self.rows[0].dim(2).unwrap());
        self
    }

    fn on(&self, device: &Device, dtype: DType) -> Case {
        let to = |tensor: &Tensor| there(&tensor.to_dtype(dtype).unwrap(), device);
        let angle = |tensor: &Tensor| there(&tensor.to_dtype(DType::F32).unwrap(), device);
        // A fused tensor, whose parts stay parts.
        let rows = self.rows.each_ref().map(|x| {
            let wide = Tensor::cat(&[x, x], 2).unwrap();
            to(&wide).narrow(2, 0, x.dim(2).unwrap()).unwrap()
        });
        Case {
            rows,
            angles: self.angles.each_ref().map(angle),
            places: there(&self.places, device),
            pools: self.pools.each_ref().map(to),
            tables: self.tables.clone(),
            keys: self.keys.clone(),
            options: self.options.map_sinks(to),
            ..*self
        }
    }

    fn sequences(&self) -> Sequences {
        self.sequences_of(&self.keys, 0)
    }

    /// The same sequences with other keys, and room for more.
    fn sequences_of(&self, keys: &[usize], room: usize) -> Sequences {
        let sequences: Vec<_> = keys
            .iter()
            .zip(&self.tables)
            .map(|(keys, table)| Sequence { queries: 1, keys: *keys, table })
            .collect();
        let device = self.places.device();
        Sequences::with_room(&sequences, room, self.block, self.blocks, device).unwrap()
    }

    fn tokens(&self) -> NewTokens<'_> {
        let ([q, k, v], [cos, sin]) = (&self.rows, &self.angles);
        NewTokens { q, k, v, cos, sin, places: &self.places }
    }

    /// What is seen, and the pools afterwards.
    fn run(&self) -> Result<[Tensor; 3]> {
        let [keys, values] = self.pools.each_ref().map(|pool| pool.copy().unwrap());
        let sequences = self.sequences();
        let seen = forward_paged_new(&self.tokens(), [&keys, &values], &sequences, &self.options)?;
        Ok([seen, keys, values])
    }

    /// The same by an operation for each.
    fn by_parts(&self) -> [Tensor; 3] {
        let [keys, values] = self.pools.each_ref().map(|pool| pool.copy().unwrap());
        let NewTokens { q, k, v, cos, sin, places } = self.tokens();
        let (q, k) = rope::forward_both(q, k, cos, sin).unwrap();
        let [q, k, v] = [&q, &k, v].map(|x| x.squeeze(1).unwrap());
        write_rows_both([&keys, &values], [&k, &v], places).unwrap();
        let seen = forward_paged(&q, &keys, &values, &self.sequences(), &self.options).unwrap();
        [seen, keys, values]
    }

    fn check(&self) {
        for (found, expected) in self.run().unwrap().iter().zip(&self.by_parts()) {
            assert_identical(found, expected);
        }
    }
}

#[test]
fn it_gives_what_its_parts_do() {
    let case = Case::new(&[1, 17, 40, 5], 4, [6, 2], 12, 4).options(Some(3.0), Some(9)).sinks();
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let case = case.on(&Device::Cpu, dtype);
        case.check();
        let [_, keys, _] = case.run().unwrap();
        let place = values(&case.places.to_dtype(DType::F64).unwrap())[1] as usize;
        let rows = keys.flatten(0, 1).unwrap();
        let [_, k, _] = &case.rows;
        let rotated = rope::forward(k, &case.angles[0], &case.angles[1]).unwrap();
        assert_identical(&rows.get(place).unwrap(), &rotated.get(1).unwrap().get(0).unwrap());
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let case = || Case::new(&[3, 5], 4, [4, 2], 8, 4);
    let short = |x: &Tensor, dim: usize| x.narrow(dim, 0, x.dim(dim).unwrap() - 1).unwrap();
    let mut cases = [(case(), "cos"), (case(), "rows"), (case(), "places"), (case(), "sin")];
    cases[0].0.rows[1] = short(&cases[0].0.rows[1], 3);
    cases[1].0.rows[2] = short(&cases[1].0.rows[2], 2);
    cases[2].0.places = short(&cases[2].0.places, 0);
    cases[3].0.angles[1] = short(&cases[3].0.angles[1], 0);
    for (case, name) in cases {
        let error = message(case.run());
        assert!(error.contains(name), "{error}");
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::attention::paged::{Sizes, cuda::takes_new};
    use crate::batch_invariance::within;
    use crate::recording::Recording;

    /// Whether one kernel has the case.
    fn is_one(case: &Case) -> bool {
        let [heads, kv_heads] = [0, 1].map(|index| case.rows[index].dim(2).unwrap());
        let sizes = Sizes { heads, kv_heads, head_dim: case.rows[0].dim(3).unwrap() };
        takes_new(sizes, &case.tokens(), case.pools.each_ref(), &case.sequences()).unwrap()
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_rotates_and_writes_on_the_way() {
        let device = crate::testing::cuda();
        let keys = [1, 16, 17, 255, 256, 257, 513, 900, 30];
        let many: Vec<_> = (1..=140).collect();
        // So many that a block takes several items, of which few are long.
        let keys_of =
            |index: usize| 1 + index * 97 % if index.is_multiple_of(16) { 1200 } else { 40 };
        let longer: Vec<_> = (0..160).map(keys_of).collect();
        for (keys, heads, head_dim, half, is_taken) in [
            (&keys[..], [8, 2], 128, 64, true),
            (&keys[..], [4, 4], 64, 32, true),
            (&keys[..], [3, 1], 80, 40, true),
            (&keys[..], [12, 2], 96, 24, true),
            (&keys[..], [20, 1], 128, 64, true),
            (&keys[..], [64, 1], 64, 16, true),
            (&keys[..], [6, 3], 256, 128, true),
            (&many[..], [8, 2], 64, 32, true),
            (&many[..], [48, 1], 64, 32, true),
            (&longer[..], [8, 2], 128, 64, true),
            (&longer[..], [8, 8], 64, 32, true),
            // Few, whose keys clusters share, but all of the longest only in windows.
            (&[500], [32, 8], 128, 64, true),
            (&[1472], [12, 1], 128, 64, true),
            (&[65, 1410, 1], [12, 4], 96, 32, true),
            (&[2001, 900], [12, 4], 64, 32, true),
            (&[300, 777], [6, 1], 256, 64, true),
            (&[130, 640], [40, 2], 128, 64, true),
            (&keys[..], [4, 2], 128, 20, false),
            (&keys[..], [4, 2], 36, 16, false),
            (&keys[..], [2, 1], 288, 144, false),
        ] {
            for block in [16, 32, 24] {
                let new = |keys| Case::new(keys, block, heads, head_dim, half);
                let cases = [
                    new(keys),
                    new(keys).options(None, Some(100)).sinks(),
                    new(keys).options(None, Some(1472)),
                    new(keys).options(Some(2.0), None).sinks(),
                    new(keys).sinks(),
                    new(&[20, 3]),
                ];
                for (index, case) in cases.iter().enumerate() {
                    for dtype in [DType::BF16, DType::F16, DType::F32] {
                        let case = case.on(&device, dtype);
                        if index == 0 {
                            let is_taken = is_taken && dtype != DType::F32 && block != 24;
                            assert_eq!(
                                is_one(&case),
                                is_taken,
                                "{heads:?} of {head_dim} in {dtype:?}"
                            );
                        }
                        case.check();
                        within(true, || case.check());
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_records_what_it_gives() {
        let device = crate::testing::cuda();
        for (most, lengths) in [
            (&[900][..], [&[900][..], &[1], &[64], &[65], &[700]]),
            (&[300, 200], [&[300, 1], &[1, 200], &[129, 64], &[2, 2], &[256, 65]]),
        ] {
            let case = Case::new(most, 16, [8, 2], 128, 64).on(&device, DType::BF16);
            let [keys, values] = &case.pools;
            let run = |sequences: &Sequences| {
                // Launches that overlap.
                for _ in 0..20 {
                    forward_paged_new(&case.tokens(), [keys, values], sequences, &case.options)?;
                }
                forward_paged_new(&case.tokens(), [keys, values], sequences, &case.options)
            };
            let first = case.sequences_of(lengths[0], 1000);
            let mut recording =
                Recording::new(&device, first.numbers(), |numbers| run(&first.reading(numbers)?))
                    .unwrap();
            for of_keys in lengths {
                let sequences = case.sequences_of(of_keys, 1000);
                recording.run(sequences.numbers()).unwrap();
                let found = here(recording.output());
                assert_identical(&found, &here(&run(&sequences).unwrap()));
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_refuses_what_does_not_fit() {
        let device = crate::testing::cuda();
        let mut case = Case::new(&[3, 5], 16, [4, 2], 64, 32).on(&device, DType::BF16);
        case.places = case.places.narrow(0, 0, 1).unwrap();
        let error = message(case.run());
        assert!(error.contains("places"), "{error}");
    }
}
