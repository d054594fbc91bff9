//! MLX's quantised matrices: `weight` `(out, in·bits/32)` u32, whose codes begin at the lowest bits, `scales` `(out, in/group)`
//! and, in mode `affine`, `biases`.

use super::{
    Parsed, Part, Stored, assembled, bytes_of, bytes_tensor, on_host, required, stored_floats,
};
use candle_core::Tensor;
use metal_candle_kernels::quantized::{E2M1, Levels, Quantized, Scales};
use serde_json::{Map, Value};

/// What `config.json` says of a layer under `quantization`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Affine { bits: usize, group: usize },
    Mxfp4,
    Mxfp8,
    Nvfp4,
}

impl Mode {
    /// Bits of a code, and elements of a group.
    fn sizes(self) -> (usize, usize) {
        match self {
            Self::Affine { bits, group } => (bits, group),
            Self::Mxfp4 => (4, 32),
            Self::Mxfp8 => (8, 32),
            Self::Nvfp4 => (4, 16),
        }
    }

    /// What `config.json` says of it under `quantization`.
    pub(crate) fn config(self) -> Value {
        let (bits, group) = self.sizes();
        serde_json::json!({ "group_size": group, "bits": bits, "mode": self.name() })
    }

    /// Its name in `config.json`.
    fn name(self) -> &'static str {
        match self {
            Self::Affine { .. } => "affine",
            Self::Mxfp4 => "mxfp4",
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
        }
    }
}

/// The matrix of a layer, whose parts have the names that follow the layer's and a dot.
pub(crate) fn read<'a>(mode: Mode, part: impl Fn(&str) -> Option<Stored<'a>>) -> Parsed<Quantized> {
    let (bits, group) = mode.sizes();
    if !matches!(bits, 2..=6 | 8) || !matches!(group, 16 | 32 | 64 | 128) {
        return Err(format!(
            "{bits} bits in groups of {group}, expected 2, 3, 4, 5, 6 or 8 in groups of 16, 32, 64 or 128"
        ));
    }
    let weight = required(&part, "weight")?;
    weight.require_dtype("weight", &["U32"])?;
    let (outer, words) = weight.matrix("weight")?;
    // The bytes are there, so these products are small enough.
    let inner = words * 32 / bits;
    if !(words * 32).is_multiple_of(bits) || !inner.is_multiple_of(group) {
        return Err(format!(
            "weight has {words} words a row, expected whole groups of {group} codes of {bits} bits"
        ));
    }
    let groups = [outer, inner / group];
    let scales = required(&part, "scales")?;
    let levels = match mode {
        Mode::Affine { .. } => Levels::Integers { bits, zero: 0 },
        Mode::Mxfp8 => Levels::E4m3,
        Mode::Mxfp4 | Mode::Nvfp4 => Levels::Table(&E2M1),
    };
    let scales = match mode {
        Mode::Affine { .. } => {
            scales.require("scales", &["F32", "F16", "BF16"], &groups)?;
            let biases = required(&part, "biases")?;
            biases.require("biases", &[scales.dtype], &groups)?;
            let offsets = Some(biases.floats("biases")?);
            Scales::Plain { scales: scales.floats("scales")?, offsets }
        }
        Mode::Mxfp4 | Mode::Mxfp8 => {
            scales.require("scales", &["U8"], &groups)?;
            Scales::E8m0(bytes_tensor(scales.bytes.to_vec())?)
        }
        Mode::Nvfp4 => {
            scales.require("scales", &["U8"], &groups)?;
            Scales::E4m3 { scales: bytes_tensor(scales.bytes.to_vec())?, overall: 1.0 }
        }
    };
    let codes = bytes_tensor(weight.bytes.to_vec())?;
    assembled(Quantized::new((outer, inner), levels, group, codes, scales))
}

/// The parts of a layer's matrix.
pub(crate) fn write(mode: Mode, matrix: &Quantized) -> Parsed<Vec<Part>> {
    let matrix = on_host(matrix)?;
    let ((bits, group), (outer, inner)) = (mode.sizes(), matrix.shape());
    let other = || format!("a matrix of other codes and scales, expected MLX's {}", mode.name());
    if matrix.group() != group
        || matrix.levels().bits() != bits
        || !inner.is_multiple_of(group)
        || !(inner * bits).is_multiple_of(32)
    {
        return Err(other());
    }
    let groups = vec![outer, inner / group];
    let floats = |name: &str, tensor: &Tensor| -> Parsed<Part> {
        let (dtype, bytes) = stored_floats(tensor)?;
        Ok(Part { name: name.to_string(), dtype, shape: groups.clone(), bytes })
    };
    let bytes = |tensor: &Tensor| -> Parsed<Part> {
        let bytes = bytes_of(tensor)?;
        Ok(Part { name: "scales".to_string(), dtype: "U8", shape: groups.clone(), bytes })
    };
    let scales = match (mode, matrix.levels(), matrix.scales()) {
        (
            Mode::Affine { .. },
            Levels::Integers { zero: 0, .. },
            Scales::Plain { scales, offsets: Some(offsets) },
        ) => vec![floats("scales", scales)?, floats("biases", offsets)?],
        (Mode::Mxfp4, Levels::Table(&E2M1), Scales::E8m0(scales)) => vec![bytes(scales)?],
        (Mode::Mxfp8, Levels::E4m3, Scales::E8m0(scales)) => vec![bytes(scales)?],
        (Mode::Nvfp4, Levels::Table(&E2M1), Scales::E4m3 { scales, overall: 1.0 }) => {
            vec![bytes(scales)?]
        }
        _ => return Err(other()),
    };
    let weight = Part {
        name: "weight".to_string(),
        dtype: "U32",
        shape: vec![outer, inner * bits / 32],
        bytes: bytes_of(matrix.codes())?,
    };
    Ok([weight].into_iter().chain(scales).collect())
}

/// Says beside keys of transformers 5 that most models of mlx-lm know nothing of what they say in those that came before
/// them: `rope_parameters`, and the number of Qwen's experts.
pub(crate) fn say_as_before(config: &mut Map<String, Value>) {
    if let Some(count) = config.get("num_local_experts").cloned()
        && config.get("model_type").is_some_and(|kind| kind == "qwen3_moe")
    {
        config.insert("num_experts".into(), count);
    }
    let Some(Value::Object(parameters)) = config.get("rope_parameters").cloned() else { return };
    // Where the kinds of layers differ, the key `rope_scaling` was for those without a window.
    let of = |kind: &str| parameters.get(kind).and_then(Value::as_object);
    let mut rope = of("full_attention").unwrap_or(&parameters).clone();
    let local = of("sliding_attention").and_then(|it| it.get("rope_theta"));
    let mut say = |key: &str, value: Option<&Value>| {
        if let Some(value) = value.filter(|value| !value.is_null()) {
            config.entry(key).or_insert_with(|| value.clone());
        }
    };
    say("rope_local_base_freq", local);
    say("original_max_position_embeddings", rope.get("original_max_position_embeddings"));
    for key in ["rope_theta", "partial_rotary_factor"] {
        say(key, rope.remove(key).as_ref());
    }
    let kind = rope.get("rope_type").or(rope.get("type")).cloned();
    if let Some(kind) = kind.filter(|kind| kind != "default") {
        rope.insert("rope_type".into(), kind.clone());
        rope.insert("type".into(), kind);
        say("rope_scaling", Some(&rope.into()));
    }
}
