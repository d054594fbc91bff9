//! What a model says of data, for others to be distilled from it.

use crate::adapter::Adapter;
use crate::autograd::Tape;
use crate::data::{Batcher, IGNORED, SampleKind, TOP_K, TeacherWriter};
use crate::model::Model;
use crate::pass::Input;
use crate::{Error, Result, bounds};
use candle_core::Tensor;
use metal_candle_kernels::{devices, embedding};
use rayon::prelude::*;
use std::path::Path;
use std::sync::Arc;

/// Rows whose logits exist at a time.
const ROWS: usize = 128;

/// Writes the `top_k` likeliest tokens in place of each target token of all examples, with their log-probabilities, as a
/// [`crate::data::Teacher`] reads them, with the time that the chat template was told. `progress` is told how many
/// examples are done; when it says false, this ends and nothing is written.
///
/// # Errors
/// [`Error::Option`] when `top_k` is out of bounds, the data are no sequences, or a logit isn't finite; when the file cannot
/// be written.
pub fn write_teacher(
    model: &Model,
    adapter: Option<&Arc<Adapter>>,
    batches: &Batcher,
    (top_k, template_time): (usize, Option<&str>),
    path: impl AsRef<Path>,
    progress: &mut dyn FnMut(usize) -> bool,
) -> Result<bool> {
    bounds::check("top_k", top_k, &TOP_K)?;
    bounds::check("top_k", top_k, &(1..=model.config().vocab_size))?;
    let data = batches.dataset();
    if data.kind() != SampleKind::Plain {
        let found = data.kind().name();
        return Err(Error::option("data", format!("are {found}, expected sequences to learn")));
    }
    let mut writer = TeacherWriter::new(path.as_ref(), top_k)?;
    let mut done = 0;
    for plan in batches.by_length() {
        let batch = batches.batch(&plan)?;
        let places = batch.counted_places();
        let likeliest = devices::step(model.device(), || -> Result<_> {
            let input = Input::batch(&batch, model.device())?.with_adapter(adapter);
            let hidden = model.forward(&Tape::inference(), &input)?.into_tensor();
            let hidden = hidden.flatten_to(1)?;
            let mut likeliest = Vec::with_capacity(places.len());
            for places in places.chunks(ROWS) {
                let places = Tensor::from_slice(places, (1, places.len()), model.device())?;
                let logits = model.logits(&embedding::forward(&hidden, &places)?, &input)?;
                let rows: Vec<Vec<f32>> = logits.squeeze(0)?.to_vec2()?;
                likeliest.par_extend(rows.par_iter().map(|row| top(row, top_k)));
            }
            Ok(likeliest)
        })?;
        let mut found = likeliest.iter();
        let rows = batch.targets.chunks(batch.length.max(1));
        for (example, targets) in plan.rows.iter().flatten().zip(rows) {
            let words = data
                .get(*example)
                .map(|example| example.ids)
                .ok_or_else(|| Error::option("data", format!("have no example {example}")))?;
            let targets = (1..).zip(targets).filter(|(_, target)| **target != IGNORED);
            let positions: Vec<usize> = targets.map(|(position, _)| position).collect();
            writer.push(&words, &positions);
            for (position, of_token) in positions.iter().zip(found.by_ref()) {
                let of_token = of_token.as_ref().ok_or_else(|| {
                    Error::option(
                        "model",
                        format!(
                            "gives logits that aren't finite for token {position} of example {example}; --dtype f32 may \
                             help"
                        ),
                    )
                })?;
                writer.say(of_token)?;
            }
        }
        done += plan.rows.len();
        if !progress(done) {
            return Ok(false);
        }
    }
    writer.write(template_time)?;
    Ok(true)
}

/// The likeliest `k` of a row of logits, with their log-probabilities; of equal ones the first. None where a logit is NaN
/// or positive infinity.
fn top(logits: &[f32], k: usize) -> Option<Vec<(u32, f32)>> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    if !total.is_finite() {
        return None;
    }
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if k < order.len() {
        order.select_nth_unstable_by(k, by_logit);
        order.truncate(k);
    }
    order.sort_unstable_by(by_logit);
    let log_probability = |id: u32| (f64::from(logits[id as usize] - largest) - total.ln()) as f32;
    Some(order.into_iter().map(|id| (id, log_probability(id))).collect())
}
