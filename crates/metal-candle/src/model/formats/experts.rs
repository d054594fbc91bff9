//! The experts of a layer where a file has one tensor for all: mlx-lm's modules of them, and those of gpt-oss as transformers
//! writes them.
//!
//! | transformers | |
//! |---|---|
//! | `experts.gate_up_proj` | `(experts, hidden, 2·width)`, of the last the even ones into gates and the odd ones into values |
//! | `experts.gate_up_proj_blocks`, `_scales` | in its place in MXFP4: `(experts, 2·width, hidden / 32, 16)` u8, two codes a byte, and `(experts, 2·width, hidden / 32)` u8 |
//! | `experts.gate_up_proj_bias` | `(experts, 2·width)` |
//! | `experts.down_proj`, `_blocks`, `_scales`, `_bias` | `(experts, width, hidden)`, and so on |

use super::checkpoint::Checkpoint;
use super::{Parsed, Stored, assembled, bytes_tensor, mlx};
use crate::model::config::ExpertsConfig;
use crate::model::weight::Storage;
use crate::model::weights::Weights;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::quantized::{E2M1, Levels, Quantized, Scales};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What mlx-lm calls the projections of all experts of a layer.
const MLX: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
/// Where transformers has them.
const INTERLEAVED: [&str; 3] = ["gate_up_proj", "gate_up_proj", "down_proj"];
/// What may follow those names.
const PARTS: [&str; 4] = ["", "_bias", "_blocks", "_scales"];
/// Elements of a block of MXFP4, and its bytes without the scale.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = BLOCK / 2;

/// The tensor of mlx-lm that has a part of an expert's layer among those of the others.
pub(crate) fn stacked_by_mlx(experts: &ExpertsConfig, name: &str) -> Option<String> {
    let (layer, place, part) = experts.split(name)?;
    let (module, stack) = (experts.names.module, experts.names.stacked.mlx);
    Some(format!("{layer}.{module}.{stack}.{}.{part}", MLX[place]))
}

/// The names of the experts' parts in a tensor of mlx-lm that has them all, or in a path that stands for all.
fn apart<'n>(experts: &'n ExpertsConfig, name: &'n str) -> Option<impl Fn(usize) -> String + 'n> {
    let (module, stack) = (experts.names.module, experts.names.stacked.mlx);
    let (layer, rest) = name.split_once(&format!(".{module}.{stack}."))?;
    let (projection, part) = match rest.split_once('.') {
        Some((projection, part)) => (projection, format!(".{part}")),
        None => (rest, String::new()),
    };
    let place = MLX.iter().position(|it| *it == projection)?;
    let projection = experts.names.projections[place];
    Some(move |expert| format!("{layer}.{module}.experts.{expert}.{projection}{part}"))
}

/// The names of the experts' parts of a tensor of transformers that has them all.
fn interleaved_apart<'n>(
    experts: &ExpertsConfig,
    name: &'n str,
) -> Option<impl Fn(usize) -> String + 'n> {
    let (path, last) = name.rsplit_once('.')?;
    let is_of_experts = path.ends_with(&format!(".{}.experts", experts.names.module));
    (is_of_experts && is_of_all(experts, last))
        .then_some(move |expert| format!("{path}.{expert}.{last}"))
}

/// Whether the last part of a path names a tensor of transformers that has a part of all experts.
pub(crate) fn is_of_all(experts: &ExpertsConfig, last: &str) -> bool {
    experts.names.stacked.interleaved && INTERLEAVED.iter().any(|stem| is_part_of(stem, last))
}

/// Whether a tensor is the one of a name, or one beside it.
fn is_part_of(stem: &str, last: &str) -> bool {
    last.strip_prefix(stem).is_some_and(|part| PARTS.contains(&part))
}

/// Takes tensors of all experts of a layer apart, and what is said of them.
pub(crate) fn unstack(
    experts: &ExpertsConfig,
    weights: &mut Weights,
    checkpoint: &mut Checkpoint,
) -> Result<()> {
    let names: Vec<String> = weights.names().map(String::from).collect();
    for name in &names {
        if let Some(of_expert) = interleaved_apart(experts, name) {
            // Files say so by themselves.
            if name.ends_with(PARTS[2]) && *checkpoint == Checkpoint::Dense {
                *checkpoint = Checkpoint::Mxfp4;
            }
            weights.unstack(name, experts.count, of_expert)?;
        } else if let Some(of_expert) = apart(experts, name) {
            weights.unstack(name, experts.count, of_expert)?;
        }
    }
    if let Checkpoint::Mlx { layers, .. } = checkpoint {
        let said: Vec<(String, mlx::Mode)> =
            layers.iter().map(|(path, mode)| (path.clone(), *mode)).collect();
        for (path, mode) in &said {
            if let Some(of_expert) = apart(experts, path) {
                layers.extend((0..experts.count).map(|expert| (of_expert(expert), *mode)));
            }
        }
    }
    Ok(())
}

/// A weight or bias of an expert, of whose numbers a tensor of transformers has others between them, or transposed.
pub(crate) struct Interleaved {
    /// What the parts' names begin with: the expert and the tensor.
    stem: String,
    /// Which of so many neighbours are its own.
    place: usize,
    of: usize,
    is_bias: bool,
}

impl Interleaved {
    /// What is read of [taken apart](unstack) weights in the place of a tensor of this name, which isn't there.
    pub fn find(experts: &ExpertsConfig, weights: &Weights, name: &str) -> Option<Self> {
        if !experts.names.stacked.interleaved || weights.contains(name) {
            return None;
        }
        let (_, place, part) = experts.split(name)?;
        let end = format!(".{}.{part}", experts.names.projections[place]);
        let stem = format!("{}.{}", name.strip_suffix(&end)?, INTERLEAVED[place]);
        let found = Self {
            stem,
            place: place % 2,
            of: if place < 2 { 2 } else { 1 },
            is_bias: part == "bias",
        };
        let is_there = match part {
            "bias" => weights.contains(&found.part("_bias")),
            "weight" => weights.contains(&found.stem) || found.is_packed(weights),
            _ => false,
        };
        is_there.then_some(found)
    }

    fn part(&self, part: &str) -> String {
        format!("{}{part}", self.stem)
    }

    fn is_packed(&self, weights: &Weights) -> bool {
        weights.contains(&self.part("_blocks"))
    }

    /// The weight `(out, in)` or the bias `(out)`.
    pub fn read(
        &self,
        weights: &Weights,
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<Storage> {
        let (place, of) = (self.place, self.of);
        if let ([outer, inner], true) = (shape, self.is_packed(weights)) {
            let [codes, scales] = self.stored(weights, (*outer, *inner))?;
            let fault = |problem: String| self.fault(weights, &problem);
            let matrix = self.packed((*outer, *inner), codes, scales).map_err(fault)?;
            if !matrix.is_finite()? {
                return Err(fault("has scales that are NaN".into()));
            }
            return Ok(Storage::Quantized(Arc::new(matrix.to_device(device)?)));
        }
        let dense = match *shape {
            [outer] if self.is_bias => {
                let whole =
                    weights.tensor(&self.part("_bias"), &[of * outer], dtype, &Device::Cpu)?;
                whole.reshape((outer, of))?.narrow(1, place, 1)?.squeeze(1)?
            }
            [outer, inner] if !self.is_bias => {
                let whole =
                    weights.tensor(&self.stem, &[inner, of * outer], dtype, &Device::Cpu)?;
                whole.reshape((inner, outer, of))?.narrow(2, place, 1)?.squeeze(2)?.t()?
            }
            _ => return Err(Error::option(&self.stem, format!("is no tensor of {shape:?}"))),
        };
        Ok(Storage::Dense(dense.contiguous()?.to_device(device)?))
    }

    fn fault(&self, weights: &Weights, problem: &str) -> Error {
        let file = weights.place_of(&self.part("_blocks"));
        Error::file(file, format!("layer {:?}: {problem}", self.stem))
    }

    /// The codes and the scales in MXFP4 of it and its neighbours.
    fn stored<'w>(
        &self,
        weights: &'w Weights,
        (outer, inner): (usize, usize),
    ) -> Result<[Stored<'w>; 2]> {
        let fault = |problem: String| self.fault(weights, &problem);
        if !inner.is_multiple_of(BLOCK) {
            return Err(fault(format!("rows of {inner}, expected whole blocks of {BLOCK}")));
        }
        let (rows, blocks) = (self.of * outer, inner / BLOCK);
        let [codes, scales] = [PARTS[2], PARTS[3]].map(|part| weights.stored(&self.part(part)));
        let (codes, scales) = (codes?, scales?);
        codes.require(PARTS[2], &["U8"], &[rows, blocks, BLOCK_BYTES]).map_err(fault)?;
        scales.require(PARTS[3], &["U8"], &[rows, blocks]).map_err(fault)?;
        Ok([codes, scales])
    }

    /// A matrix in MXFP4, of what is [stored](Self::stored).
    fn packed(&self, shape: (usize, usize), codes: Stored, scales: Stored) -> Parsed<Quantized> {
        let blocks = shape.1 / BLOCK;
        let own = |bytes: &[u8], row: usize| -> Vec<u8> {
            let rows = bytes.chunks_exact(row).skip(self.place).step_by(self.of);
            rows.flatten().copied().collect()
        };
        let codes = bytes_tensor(own(codes.bytes, blocks * BLOCK_BYTES))?;
        let scales = bytes_tensor(own(scales.bytes, blocks))?;
        let (levels, scales) = (Levels::Table(&E2M1), Scales::E8m0(scales));
        assembled(Quantized::new(shape, levels, BLOCK, codes, scales))
    }

    /// The bytes that it takes in fewer bits, `None` where it is dense; its shape is looked at.
    pub fn outline(&self, weights: &Weights, shape: &[usize]) -> Result<Option<usize>> {
        match *shape {
            [outer] => weights.outline(&self.part("_bias"), &[self.of * outer])?,
            [outer, inner] if self.is_packed(weights) => {
                let parts = self.stored(weights, (outer, inner))?;
                let bytes: usize = parts.iter().map(|part| part.bytes.len()).sum();
                return Ok(Some(bytes / self.of));
            }
            [outer, inner] => weights.outline(&self.stem, &[inner, self.of * outer])?,
            _ => return Err(Error::option(&self.stem, format!("is no tensor of {shape:?}"))),
        }
        Ok(None)
    }
}

/// A tensor of a dense file as transformers has it: a weight, or those of all experts of a layer.
#[derive(Debug)]
pub(crate) struct Together<T> {
    pub name: String,
    /// The weights, of an expert's two neighbouring ones where rows of both take turns.
    pub parts: Vec<T>,
    /// How many of them have a row each, and whether rows become columns; `None` for a weight by itself.
    form: Option<(usize, bool)>,
}

/// The tensors that have these weights, by name.
pub(crate) fn together<T>(
    experts: Option<&ExpertsConfig>,
    weights: impl Iterator<Item = (String, T)>,
) -> Vec<Together<T>> {
    let experts = experts.filter(|experts| experts.names.stacked.interleaved);
    let mut tensors: BTreeMap<String, Together<T>> = BTreeMap::new();
    for (name, weight) in weights {
        let of_experts = experts.and_then(|it| Some((it.names.module, it.split(&name)?)));
        let (name, form) = match of_experts {
            Some((module, (layer, place, part))) => {
                let is_bias = part == "bias";
                let part = if is_bias { PARTS[1] } else { PARTS[0] };
                let name = format!("{layer}.{module}.experts.{}{part}", INTERLEAVED[place]);
                (name, Some((if place < 2 { 2 } else { 1 }, !is_bias)))
            }
            None => (name, None),
        };
        let empty = || Together { name: name.clone(), parts: Vec::new(), form };
        tensors.entry(name.clone()).or_insert_with(empty).parts.push(weight);
    }
    tensors.into_values().collect()
}

impl<T> Together<T> {
    /// Its shape, where each part has this one.
    pub fn shape(&self, part: &[usize]) -> Vec<usize> {
        let Some((of, is_across)) = self.form else { return part.to_vec() };
        let count = self.parts.len() / of;
        match *part {
            [outer, inner] if is_across => vec![count, inner, of * outer],
            [outer, ref rest @ ..] => [&[count, of * outer], rest].concat(),
            [] => vec![count],
        }
    }

    /// The tensors of blocks and scales in the place of it, of what its parts are in MXFP4.
    pub fn packed(&self, parts: &[Quantized]) -> Result<[(String, Tensor); 2]> {
        let (Some((of, true)), Some(first)) = (self.form, parts.first()) else {
            return Err(Error::option(&self.name, "is no matrix of experts"));
        };
        let (outer, inner) = first.shape();
        let blocks = inner / BLOCK;
        let joined = |tensors: Vec<Tensor>, row: &[usize]| -> Result<Tensor> {
            let shape = [&[outer], row].concat();
            let tensors = tensors.iter().map(|tensor| tensor.reshape(shape.clone()));
            let tensors = tensors.collect::<candle_core::Result<Vec<_>>>()?;
            let experts = tensors.chunks(of).map(|parts| Tensor::stack(parts, 1)?.flatten(0, 1));
            Ok(Tensor::stack(&experts.collect::<candle_core::Result<Vec<_>>>()?, 0)?)
        };
        let scales = parts.iter().map(|matrix| match (matrix.levels(), matrix.scales()) {
            (Levels::Table(&E2M1), Scales::E8m0(scales)) => Ok(scales.clone()),
            _ => Err(Error::option(&self.name, "isn't in MXFP4")),
        });
        let scales = joined(scales.collect::<Result<Vec<_>>>()?, &[blocks])?;
        let codes = parts.iter().map(|matrix| matrix.codes().clone()).collect();
        let codes = joined(codes, &[blocks, BLOCK_BYTES])?;
        let [of_codes, of_scales] = [PARTS[2], PARTS[3]].map(|part| format!("{}{part}", self.name));
        Ok([(of_codes, codes), (of_scales, scales)])
    }

    /// The tensor, of what its parts are.
    pub fn join(&self, parts: &[Tensor]) -> Result<Tensor> {
        let (of, is_across) = match (self.form, parts) {
            (None, [weight]) => return Ok(weight.clone()),
            (None, _) => return Err(Error::option(&self.name, "has more or less than one weight")),
            (Some(form), _) => form,
        };
        let experts = parts.chunks(of).map(|parts| Tensor::stack(parts, 1)?.flatten(0, 1));
        let all = Tensor::stack(&experts.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
        Ok(if is_across { all.transpose(1, 2)?.contiguous()? } else { all })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Config;
    use serde_json::json;

    #[test]
    fn what_is_written_for_all_experts_is_read_of_each() {
        let config =
            json!({ "model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 1 });
        let experts = Config::from_json(&config.to_string()).unwrap().experts.unwrap();
        let mut given = Vec::new();
        for expert in 0..3 {
            for (place, (name, shape)) in
                [("gate_proj", [4, 2]), ("up_proj", [4, 2]), ("down_proj", [2, 4])]
                    .into_iter()
                    .enumerate()
            {
                let path = format!("model.layers.5.mlp.experts.{expert}.{name}");
                let start = (100 * expert + 10 * place) as f32;
                let weight = Tensor::arange(start, start + 8.0, &Device::Cpu).unwrap();
                let weight = weight.reshape(shape.to_vec()).unwrap();
                given.push((format!("{path}.bias"), weight.get_on_dim(1, 0).unwrap()));
                given.push((format!("{path}.weight"), weight));
            }
        }
        let written = together(Some(&experts), given.clone().into_iter()).into_iter().map(|it| {
            let tensor = it.join(&it.parts).unwrap();
            assert_eq!(it.shape(it.parts[0].dims()), tensor.dims());
            (it.name, tensor)
        });
        let written: Vec<_> = written.collect();
        let shapes: Vec<_> =
            written.iter().map(|(name, it)| (name.as_str(), it.dims().to_vec())).collect();
        let path = "model.layers.5.mlp.experts";
        let names = ["down_proj", "down_proj_bias", "gate_up_proj", "gate_up_proj_bias"]
            .map(|name| format!("{path}.{name}"));
        let expected = [vec![3, 4, 2], vec![3, 2], vec![3, 2, 8], vec![3, 8]];
        let expected: Vec<_> = names.iter().map(String::as_str).zip(expected).collect();
        assert_eq!(shapes, expected);

        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        crate::files::write_safetensors(&file, &written, None).unwrap();
        let mut weights = Weights::open(folder.path()).unwrap();
        unstack(&experts, &mut weights, &mut Checkpoint::Dense).unwrap();
        for (name, tensor) in &given {
            let found = Interleaved::find(&experts, &weights, name).unwrap();
            assert_eq!(found.outline(&weights, tensor.dims()).unwrap(), None);
            let read = found.read(&weights, tensor.dims(), DType::F32, &Device::Cpu).unwrap();
            let Storage::Dense(read) = read else { panic!("{name} isn't dense") };
            let numbers = |it: &Tensor| it.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(numbers(&read), numbers(tensor), "{name}");
        }
        assert!(weights.unread().is_empty());
        let other = "model.layers.5.mlp.experts.3.gate_proj.weight";
        assert!(Interleaved::find(&experts, &weights, other).is_none());
    }
}
