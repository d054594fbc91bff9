//! EVA: A starts as the directions in which a layer's inputs vary most over the training data, and layers of whose
//! inputs these directions explain more get higher ranks (Paischer et al., 2024, arXiv:2410.07170).
//!
//! The directions are found batch by batch (Ross et al., 2008, Incremental Learning for Robust Visual Tracking, section
//! 3.1). Of n inputs with the mean μ the k largest singular values σ and their vectors V are kept, of the inputs without
//! their mean; with m inputs X of the mean ν, those of `[σ·V; X - ν; √(n·m/(n+m))·(μ - ν)]` take their place.

use super::singular::{self, Search, Singular};
use crate::Result;
use crate::random::SplitMix64;
use candle_core::{Device, Tensor};
use metal_candle_cpu::vectors::{Rows, dot, orthonormalize};

/// Iterations of the search, which begins where the one for the batch before ended; as many as PEFT makes.
const ITERATIONS: usize = 5;
/// Inputs that are taken in at once, which bounds the memory.
const MOST_ROWS: usize = 4096;
/// A direction with less than this part of the largest σ² is rounding.
const NOISE: f64 = 1e-10;

/// The directions in which inputs `(n, in)` vary most.
#[derive(Debug)]
pub(crate) struct Directions {
    wanted: usize,
    /// Inputs so far.
    count: usize,
    mean: Vec<f64>,
    /// The sum of the squares of all inputs without their mean.
    total: f64,
    /// Of length 1, `(k, in)` in f32.
    vectors: Option<Tensor>,
    /// σ², the largest first.
    squares: Vec<f64>,
}

impl Directions {
    /// At most `wanted` of them.
    pub fn new(wanted: usize) -> Self {
        let (mean, squares) = (Vec::new(), Vec::new());
        Self { wanted, count: 0, mean, total: 0.0, vectors: None, squares }
    }

    /// Whether some have been found.
    pub fn is_known(&self) -> bool {
        self.vectors.is_some()
    }

    /// Whether all inputs so far were finite.
    pub fn is_finite(&self) -> bool {
        self.total.is_finite()
    }

    /// Takes in inputs `(m, in)` in f32, and gives the cosine of each direction and the one that was there before;
    /// none where there were none.
    pub fn update(&mut self, inputs: &Tensor) -> Result<Vec<f64>> {
        let before = self.rows()?;
        let rows = inputs.dim(0)?;
        for first in (0..rows).step_by(MOST_ROWS) {
            self.take_in(&inputs.narrow(0, first, MOST_ROWS.min(rows - first))?)?;
        }
        let pairs = before.iter().zip(self.rows()?).zip(&self.squares);
        // What is rounding has no direction that could settle.
        let cosine = |((before, now), square): ((&Vec<f64>, Vec<f64>), &f64)| match *square {
            0.0 => 1.0,
            _ => dot(before, &now),
        };
        Ok(pairs.map(cosine).collect())
    }

    fn take_in(&mut self, inputs: &Tensor) -> Result<()> {
        let (rows, width) = inputs.dims2()?;
        let mean = inputs.mean(0)?;
        let centred = inputs.broadcast_sub(&mean)?;
        let of_rows = centred.sqr()?.sum(1)?.to_device(&Device::Cpu)?.to_vec1::<f32>()?;
        self.total += of_rows.into_iter().map(f64::from).sum::<f64>();
        if !self.total.is_finite() {
            return Ok(());
        }
        let mean = mean.to_device(&Device::Cpu)?.to_vec1::<f32>()?;
        let mean: Vec<f64> = mean.into_iter().map(f64::from).collect();
        let (seen, new) = (self.count as f64, rows as f64);
        let stacked = match &self.vectors {
            None => {
                self.mean = mean;
                centred
            }
            Some(vectors) => {
                let device = inputs.device();
                let sigmas: Vec<f32> = self.squares.iter().map(|it| it.sqrt() as f32).collect();
                let sigmas = Tensor::from_vec(sigmas, (self.squares.len(), 1), device)?;
                let factor = (seen * new / (seen + new)).sqrt();
                let moved: Vec<f64> =
                    self.mean.iter().zip(&mean).map(|(old, new)| factor * (old - new)).collect();
                self.total += dot(&moved, &moved);
                for (old, new_mean) in self.mean.iter_mut().zip(&mean) {
                    *old = (seen * *old + new * new_mean) / (seen + new);
                }
                let moved: Vec<f32> = moved.into_iter().map(|value| value as f32).collect();
                let moved = Tensor::from_vec(moved, (1, width), device)?;
                Tensor::cat(&[&vectors.broadcast_mul(&sigmas)?, &centred, &moved], 0)?
            }
        };
        self.count += rows;
        let search = Search {
            wanted: self.wanted,
            vectors: 2 * self.wanted,
            iterations: ITERATIONS,
            tolerance: None,
        };
        let Singular { mut right, mut squares, .. } =
            singular::largest(&stacked, self.rows()?, &search)?;
        right.truncate(self.wanted);
        // Of v and -v the one whose largest number is positive, as in PEFT; where another number becomes the largest, the
        // other one is another direction.
        for row in &mut right {
            let largest = row.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs()));
            let sign = largest.unwrap_or_default().signum();
            row.iter_mut().for_each(|value| *value *= sign);
        }
        squares.truncate(self.wanted);
        let least = NOISE * squares.first().copied().unwrap_or_default();
        let real = squares.iter().take_while(|square| **square > least).count();
        if real < right.len() {
            // Whatever is orthogonal to the others.
            squares[real..].fill(0.0);
            let mut random = SplitMix64::new(0);
            right[real..].iter_mut().flatten().for_each(|value| *value = random.normal());
            orthonormalize(&mut right);
        }
        self.vectors = Some(singular::tensor(&right, inputs.device())?);
        self.squares = squares;
        Ok(())
    }

    fn rows(&self) -> Result<Rows> {
        self.vectors.as_ref().map_or_else(|| Ok(Rows::new()), singular::rows)
    }

    /// How much of the variance each direction explains, of 1.
    pub fn shares(&self) -> Vec<f64> {
        let total = self.total.max(f64::MIN_POSITIVE);
        self.squares.iter().map(|square| square / total).collect()
    }

    /// The first `rank` of them as an A `(in, rank)` in f32, divided by the square roots of their singular values where
    /// `whiten`.
    pub fn start(&self, rank: usize, whiten: bool) -> Result<Tensor> {
        let mut rows = self.rows()?;
        rows.truncate(rank);
        let least = NOISE * self.squares.first().copied().unwrap_or_default();
        for (row, square) in rows.iter_mut().zip(&self.squares).filter(|_| whiten) {
            let sigma = square.max(least).max(f64::MIN_POSITIVE).sqrt();
            row.iter_mut().for_each(|value| *value /= sigma.sqrt());
        }
        Ok(singular::tensor(&rows, &Device::Cpu)?.t()?.contiguous()?)
    }
}

/// The rank of each layer whose directions explain these shares, where all ranks together are at most `budget`: it goes
/// to the directions that explain most of their own layer's inputs.
pub(crate) fn ranks(shares: &[&[f64]], budget: usize) -> Vec<usize> {
    let of_layer = |(layer, shares): (usize, &&[f64])| -> Vec<(usize, f64)> {
        shares.iter().map(|share| (layer, *share)).collect()
    };
    let mut all: Vec<(usize, f64)> = shares.iter().enumerate().flat_map(of_layer).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut ranks = vec![0; shares.len()];
    for (layer, _) in all.into_iter().take(budget) {
        ranks[layer] += 1;
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;
    use metal_candle_cpu::vectors::{eigenvectors, gram};

    /// `count` inputs of `width` numbers with a mean that isn't zero, whose directions have these deviations, and
    /// little of everything else.
    fn inputs(count: usize, width: usize, deviations: &[f64], rest: f64, seed: u64) -> Rows {
        let mut random = SplitMix64::new(3);
        let mut directions: Rows =
            deviations.iter().map(|_| (0..width).map(|_| random.normal()).collect()).collect();
        orthonormalize(&mut directions);
        let mean: Vec<f64> = (0..width).map(|_| 3.0 * random.normal()).collect();
        let mut random = SplitMix64::stream(4, seed);
        let input = |_| {
            let mut input: Vec<f64> = mean.iter().map(|it| it + rest * random.normal()).collect();
            for (direction, deviation) in directions.iter().zip(deviations) {
                let size = deviation * random.normal();
                input.iter_mut().zip(direction).for_each(|(sum, value)| *sum += size * value);
            }
            input
        };
        // As they are in f32.
        let rows: Rows = (0..count).map(input).collect();
        singular::rows(&singular::tensor(&rows, &Device::Cpu).unwrap()).unwrap()
    }

    /// The squares of all singular values of the inputs without their mean, and the right vectors, in f64.
    fn decompose(inputs: &Rows) -> (Vec<f64>, Rows) {
        let (count, width) = (inputs.len() as f64, inputs[0].len());
        let mean: Vec<f64> =
            (0..width).map(|at| inputs.iter().map(|it| it[at]).sum::<f64>() / count).collect();
        let columns: Rows =
            (0..width).map(|at| inputs.iter().map(|it| it[at] - mean[at]).collect()).collect();
        eigenvectors(gram(&columns))
    }

    fn update(directions: &mut Directions, inputs: &Rows) -> Vec<f64> {
        directions.update(&singular::tensor(inputs, &Device::Cpu).unwrap()).unwrap()
    }

    #[test]
    fn directions_by_batches_are_those_of_all_inputs_at_once() {
        // Whole spaces, and subspaces that have to be found; more inputs than numbers, and fewer.
        for (count, width, wanted) in [(90, 21, 4), (400, 37, 6), (700, 200, 5), (150, 230, 3)] {
            let deviations: Vec<f64> =
                (0..wanted as i32 + 1).map(|n| 9.0 * 0.6f64.powi(n)).collect();
            let all = inputs(count, width, &deviations, 0.01, width as u64);
            let (squares, vectors) = decompose(&all);
            let total: f64 = squares.iter().sum();
            for sizes in [&[count][..], &[7, 1, 30, 2, 64], &[33]] {
                let mut directions = Directions::new(wanted);
                let (mut rest, mut size) = (all.as_slice(), sizes.iter().cycle());
                while !rest.is_empty() {
                    let (batch, after) = rest.split_at((*size.next().unwrap()).min(rest.len()));
                    update(&mut directions, &batch.to_vec());
                    rest = after;
                }
                let name = format!("{count} x {width} by {sizes:?}");
                let found = directions.rows().unwrap();
                assert_eq!(found.len(), wanted, "{name}");
                let shares = directions.shares();
                for (index, found) in found.iter().enumerate() {
                    let cosine = dot(found, &vectors[index]).abs();
                    assert!(cosine > 0.999, "{name}: direction {index} has a cosine of {cosine}");
                    assert!((dot(found, found) - 1.0).abs() < 1e-5, "{name}");
                    let (share, expected) = (shares[index], squares[index] / total);
                    assert!((share / expected - 1.0).abs() < 1e-2, "{name}: {share}, {expected}");
                }
            }
        }
    }

    #[test]
    fn a_spectrum_that_is_kept_whole_is_exact() {
        let all = inputs(60, 12, &[5.0, 3.0, 2.0, 0.5], 0.0, 9);
        let (squares, vectors) = decompose(&all);
        let mut directions = Directions::new(4);
        // Fewer inputs than directions, first and later.
        for batch in [&all[..3], &all[3..5], &all[5..6], &all[6..]] {
            update(&mut directions, &batch.to_vec());
        }
        for (index, found) in directions.rows().unwrap().iter().enumerate() {
            assert!(dot(found, &vectors[index]).abs() > 1.0 - 1e-5, "{index}");
            assert!((directions.squares[index] / squares[index] - 1.0).abs() < 1e-4, "{index}");
        }
        assert!((directions.shares().iter().sum::<f64>() - 1.0).abs() < 1e-4);
    }

    #[test]
    fn directions_beyond_those_of_the_data_are_orthogonal_and_explain_nothing() {
        let all = inputs(30, 12, &[5.0, 3.0], 0.0, 9);
        let mut directions = Directions::new(5);
        assert_eq!(update(&mut directions, &all[..10].to_vec()), [0.0; 0]);
        let cosines = update(&mut directions, &all[10..].to_vec());
        assert!(cosines[..2].iter().all(|cosine| *cosine < 1.0 - 1e-9), "{cosines:?}");
        assert_eq!(cosines[2..], [1.0; 3]);
        assert_eq!(directions.shares()[2..], [0.0; 3]);
        let products = gram(&directions.rows().unwrap());
        for (row, products) in products.iter().enumerate() {
            for (column, product) in products.iter().enumerate() {
                let expected = if row == column { 1.0 } else { 0.0 };
                assert!((product - expected).abs() < 1e-5, "{row} {column}: {product}");
            }
        }
        let whitened = directions.start(5, true).unwrap().flatten_all().unwrap();
        assert!(whitened.to_vec1::<f32>().unwrap().iter().all(|value| value.is_finite()));
    }

    #[test]
    fn many_inputs_at_once_are_taken_in_by_parts() {
        let all = inputs(MOST_ROWS + 50, 10, &[4.0, 2.0, 1.0], 0.01, 5);
        let (squares, vectors) = decompose(&all);
        let mut directions = Directions::new(3);
        update(&mut directions, &all);
        assert_eq!(directions.count, all.len());
        for (index, found) in directions.rows().unwrap().iter().enumerate() {
            assert!(dot(found, &vectors[index]).abs() > 0.9999, "{index}");
            assert!((directions.squares[index] / squares[index] - 1.0).abs() < 1e-3, "{index}");
        }
    }

    #[test]
    fn ranks_go_where_a_direction_explains_most() {
        let shares: [&[f64]; 3] = [&[0.5, 0.2, 0.1], &[0.5, 0.4, 0.3], &[0.05, 0.04, 0.03]];
        assert_eq!(ranks(&shares, 4), [1, 3, 0]);
        assert_eq!(ranks(&shares, 5), [2, 3, 0]);
        // Of what is the same the first layer's.
        assert_eq!(ranks(&shares, 1), [1, 0, 0]);
        assert_eq!(ranks(&shares, 100), [3, 3, 3]);
    }
}
