//! The fused head and cross entropy on Metal: the rows that count are gathered, logits are made in f32 a
//! chunk of rows at a time, and a kernel turns them into losses and gradients.

use super::{ALIGNMENT, AllCounted, Options, Output, Statistics};
use crate::backend::metal::product::{Finish, Matrix, Term};
use crate::backend::metal::{Argument, Array, Metal, by_dtype, size};
use crate::embedding;
use candle_core::{DType, Result, Tensor};

/// Bytes of logits that exist at a time. The head's weight is read once for so many rows that reading it
/// doesn't count.
pub(super) const MEMORY: usize = 128 << 20;

pub(crate) struct Problem<'a> {
    /// `(n, d)`
    pub(crate) hidden: &'a Tensor,
    /// `(v, d)`
    pub(crate) weight: &'a Tensor,
    pub(crate) counted: &'a AllCounted,
    pub(crate) options: &'a Options,
    pub(crate) need_dhidden: bool,
    /// Leading columns of the weight that need a gradient.
    pub(crate) trained: usize,
}

/// Where the gradient with respect to the products goes, as the kernel knows it.
const NOWHERE: u32 = 0;
const APART: u32 = 1;
const IN_PLACE: u32 = 2;

impl Problem<'_> {
    /// The results, in chunks of so many rows.
    pub(crate) fn run(&self, operation: &str, chunk: usize) -> Result<Output> {
        let metal = Metal::of(self.hidden)?;
        let (n, d) = self.hidden.dims2()?;
        let (v, dtype) = (self.weight.dim(0)?, self.hidden.dtype());
        let AllCounted { rows: of_rows, tokens, shares, width } = self.counted;
        let (count, width) = (of_rows.len(), *width);
        let needs_dweight = self.trained > 0;
        let loss = metal.empty((), DType::F32)?;
        let losses = metal.zeros(n)?;
        let statistics = match self.options.statistics {
            true => Some([metal.zeros(n)?, metal.zeros(n)?]),
            false => None,
        };
        if count == 0 {
            metal.clear(&loss)?;
            let dhidden = match self.need_dhidden {
                // Nothing has a place there, so nothing of it is read.
                true => Some(self.scatter(&metal, &metal.contiguous(self.hidden)?)?),
                false => None,
            };
            let dweight = needs_dweight.then(|| metal.zeros((v, self.trained))).transpose()?;
            return Ok(output(loss, losses, statistics, count, dhidden, dweight));
        }
        let device = self.hidden.device();
        let on_device = |numbers: &[u32]| Tensor::from_slice(numbers, (1, numbers.len()), device);
        let floats = |numbers: &[f32]| {
            let numbers = Tensor::from_slice(numbers, (1, numbers.len()), device)?;
            metal.strided(&numbers)
        };
        let targets = metal.strided(&on_device(tokens)?)?;
        let shares = floats(shares)?;
        let places: Vec<u32> = of_rows.iter().map(|counted| counted.row as u32).collect();
        let places = on_device(&places)?;
        let of_counted = metal.strided(&places)?;
        let weights: Vec<f32> = of_rows.iter().map(|counted| counted.weight).collect();
        let share_sums: Vec<f32> = of_rows.iter().map(|counted| counted.share).collect();
        let (weights, share_sums) = (floats(&weights)?, floats(&share_sums)?);
        let weight = metal.collapsed_rows(self.weight)?;
        let hidden = if count == n {
            metal.collapsed_rows(self.hidden)?
        } else {
            metal.strided(&embedding::forward(self.hidden, &places)?.squeeze(0)?)?
        };
        let chunk = chunk.min(count);
        let stride = v.next_multiple_of(ALIGNMENT);
        let products = metal.empty((chunk, stride), DType::F32)?;
        let target_logits = metal.empty((chunk, width), DType::F32)?;
        let (gradients, place) = match (self.need_dhidden || needs_dweight, dtype) {
            (false, _) => (None, NOWHERE),
            (true, DType::F32) => (None, IN_PLACE),
            (true, _) => (Some(metal.empty((chunk, stride), dtype)?), APART),
        };
        let all_gradients = Matrix::of(gradients.as_ref().unwrap_or(&products), stride);
        let dhidden = self.need_dhidden.then(|| metal.empty((count, d), dtype)).transpose()?;
        let dweight =
            needs_dweight.then(|| metal.empty((v, self.trained), DType::F32)).transpose()?;
        let head = Matrix::rows(&weight)?;
        let hidden_stride = hidden.tensor.stride().first().map_or(d, |stride| *stride);
        for start in (0..count).step_by(chunk) {
            let rows = chunk.min(count - start);
            let hidden = hidden.at(start * hidden_stride * dtype.size_in_bytes());
            let hidden = Matrix::of(&hidden, hidden_stride);
            let terms = [Term::new(hidden, head.t(), d)];
            metal.product(operation, rows, v, &terms, Matrix::of(&products, stride))?;

            let of_chunk = |array: &Array| array.at(start * size_of::<u32>());
            let [of_counted, weights, share_sums] =
                [&of_counted, &weights, &share_sums].map(of_chunk);
            let [targets, shares] =
                [&targets, &shares].map(|array| array.at(start * width * size_of::<u32>()));
            // What isn't wanted isn't written.
            let [entropies, hits] = match &statistics {
                Some([entropies, hits]) => [Argument::Output(entropies), Argument::Output(hits)],
                None => [Argument::Input(&weights), Argument::Input(&weights)],
            };
            let arguments = [
                match place {
                    IN_PLACE => Argument::Output(&products),
                    _ => Argument::Input(&products),
                },
                gradients.as_ref().map_or(Argument::Input(&products), Argument::Output),
                Argument::Input(&targets),
                Argument::Output(&losses),
                Argument::U64(stride as u64),
                Argument::U32(size(operation, v)?),
                Argument::F32(self.options.logit_scale as f32),
                Argument::F32(self.options.softcap.unwrap_or(0.0) as f32),
                Argument::U32(place),
                Argument::Input(&of_counted),
                Argument::Input(&weights),
                entropies,
                hits,
                Argument::U32(u32::from(statistics.is_some())),
                Argument::Input(&shares),
                Argument::Input(&share_sums),
                Argument::Output(&target_logits),
                Argument::U32(size(operation, width)?),
            ];
            let name = by_dtype!("cross_entropy_rows", dtype)?;
            metal.run(&[metal.by_row(name, rows, v, &arguments)?])?;

            if let Some(dhidden) = &dhidden {
                let to = dhidden.at(start * d * dtype.size_in_bytes());
                let terms = [Term::new(all_gradients, head, v)];
                metal.product(operation, rows, d, &terms, Matrix::of(&to, d))?;
            }
            if let Some(dweight) = &dweight {
                let terms = [Term::new(all_gradients.t(), hidden, rows)];
                let finish = Finish { add: start > 0, ..Finish::default() };
                let to = Matrix::of(dweight, self.trained);
                metal.product_with(operation, v, self.trained, &terms, finish, to)?;
            }
        }
        let arguments = [
            Argument::Input(&losses),
            Argument::Output(&loss),
            Argument::U32(size(operation, count)?),
            Argument::Input(&of_counted),
            Argument::Input(&weights),
        ];
        metal.run(&[metal.by_row("cross_entropy_sum", 1, count, &arguments)?])?;
        let dhidden = match dhidden {
            Some(of_counted) if count < n => Some(self.scatter(&metal, &of_counted)?),
            other => other,
        };
        Ok(output(loss, losses, statistics, count, dhidden, dweight))
    }

    /// The rows of those that count in their places among all, with zeros for the others.
    fn scatter(&self, metal: &Metal, of_counted: &Array) -> Result<Array> {
        let (n, d) = self.hidden.dims2()?;
        let mut places = vec![u32::MAX; n];
        for (place, counted) in (0..).zip(&self.counted.rows) {
            places[counted.row] = place;
        }
        let places = Tensor::from_vec(places, n, self.hidden.device())?;
        let places = metal.strided(&places)?;
        let out = metal.empty((n, d), of_counted.dtype)?;
        let arguments = [
            Argument::Input(of_counted),
            Argument::Input(&places),
            Argument::Output(&out),
            Argument::U32(size("cross_entropy", d)?),
        ];
        let name = by_dtype!("cross_entropy_scatter", of_counted.dtype)?;
        metal.run(&[metal.by_elements(name, d, n, &arguments)?])?;
        Ok(out)
    }
}

fn output(
    loss: Array,
    losses: Array,
    statistics: Option<[Array; 2]>,
    count: usize,
    dhidden: Option<Array>,
    dweight: Option<Array>,
) -> Output {
    Output {
        loss: loss.tensor,
        losses: losses.tensor,
        statistics: statistics
            .map(|[entropies, hits]| Statistics { entropies: entropies.tensor, hits: hits.tensor }),
        count,
        dhidden: dhidden.map(|dhidden| dhidden.tensor),
        dweight: dweight.map(|dweight| dweight.tensor),
    }
}
