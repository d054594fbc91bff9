//! bitsandbytes' NF4 and FP4 in safetensors: `weight` with the first element in the high half of a byte, the scales
//! (`weight.absmax`), the tables of levels, and a JSON text as a tensor of bytes.

use super::{
    Parsed, Part, Stored, assembled, bytes_of, bytes_tensor, elements, on_host, required,
    stored_floats,
};
use metal_candle_kernels::quantized::{FP4, Levels, NESTED, NF4, Quantized, Scales};
use serde::{Deserialize, Serialize};

/// What a matrix has beside its tensors, in bitsandbytes' words.
#[derive(Debug, Deserialize, Serialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    /// What it was before, and is computed in.
    dtype: String,
    shape: Vec<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nested_blocksize: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nested_dtype: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nested_offset: Option<f64>,
}

const KINDS: [(&str, &[f32; 16]); 2] = [("nf4", &NF4), ("fp4", &FP4)];

fn state_name(kind: &str) -> String {
    format!("weight.quant_state.bitsandbytes__{kind}")
}

/// Whether a layer is one of bitsandbytes' by the names of its parts.
pub(crate) fn is_one(has: impl Fn(&str) -> bool) -> bool {
    KINDS.iter().any(|(kind, _)| has(&state_name(kind)))
}

/// The matrix of a layer, whose parts have the names that follow the layer's and a dot.
pub(crate) fn read<'a>(part: impl Fn(&str) -> Option<Stored<'a>>) -> Parsed<Quantized> {
    let found =
        KINDS.iter().find_map(|(kind, table)| Some((kind, table, part(&state_name(kind))?)));
    let Some((kind, &table, state)) = found else {
        return Err(format!("{} is missing", state_name("nf4")));
    };
    let name = state_name(kind);
    state.require_dtype(&name, &["U8"])?;
    let state: State =
        serde_json::from_slice(state.bytes).map_err(|error| format!("{name}: {error}"))?;
    if state.quant_type != *kind {
        return Err(format!("{name}: quant_type is {:?}, expected {kind:?}", state.quant_type));
    }
    let [outer, inner] = state.shape[..] else {
        return Err(format!("{name}: shape is {:?}, expected two dimensions", state.shape));
    };
    let Some(count) = elements(&state.shape) else {
        return Err(format!("{name}: shape {:?} is too large", state.shape));
    };
    let block = state.blocksize;
    if block == 0 || block % 2 == 1 {
        return Err(format!("{name}: blocksize is {block}, expected an even number"));
    }
    let map = required(&part, "weight.quant_map")?;
    map.require("weight.quant_map", &["F32"], &[16])?;
    let map = map.f32s("weight.quant_map")?;
    // Versions of bitsandbytes differ in the last digit.
    if map.iter().zip(table).any(|(found, expected)| (found - expected).abs() > 1e-5) {
        return Err(format!("weight.quant_map is {map:?}, expected {table:?}"));
    }
    let weight = required(&part, "weight")?;
    if weight.bytes.len() != count.div_ceil(2) {
        return Err(format!(
            "weight has {} bytes, expected {} for {outer} x {inner} elements",
            weight.bytes.len(),
            count.div_ceil(2)
        ));
    }
    let groups = count.div_ceil(block);
    let absmax = required(&part, "weight.absmax")?;
    let scales = match part("weight.nested_absmax") {
        None => {
            absmax.require("weight.absmax", &["F32", "F16", "BF16"], &[groups])?;
            Scales::Plain { scales: absmax.floats("weight.absmax")?, offsets: None }
        }
        Some(nested) => {
            if state.nested_blocksize != Some(NESTED) {
                return Err(format!(
                    "{name}: nested_blocksize is {:?}, expected {NESTED}",
                    state.nested_blocksize
                ));
            }
            let Some(offset) = state.nested_offset else {
                return Err(format!("{name}: nested_offset is missing"));
            };
            let table = required(&part, "weight.nested_quant_map")?;
            absmax.require("weight.absmax", &["U8"], &[groups])?;
            nested.require("weight.nested_absmax", &["F32"], &[groups.div_ceil(NESTED)])?;
            table.require("weight.nested_quant_map", &["F32"], &[256])?;
            Scales::Nested {
                codes: bytes_tensor(absmax.bytes.to_vec())?,
                table: table.floats("weight.nested_quant_map")?,
                scales: nested.floats("weight.nested_absmax")?,
                offset: offset as f32,
            }
        }
    };
    let mut codes: Vec<u8> = weight.bytes.iter().map(|byte| byte.rotate_left(4)).collect();
    if let (1, Some(last)) = (count % 2, codes.last_mut()) {
        *last &= 0x0f;
    }
    let codes = bytes_tensor(codes)?;
    assembled(Quantized::new((outer, inner), Levels::Table(table), block, codes, scales))
}

/// The parts of a layer's matrix, which was of `dtype` (`bfloat16` ...) before.
pub(crate) fn write(matrix: &Quantized, dtype: &str) -> Parsed<Vec<Part>> {
    let matrix = on_host(matrix)?;
    let found = KINDS.iter().find(|(_, table)| matrix.levels() == Levels::Table(table));
    let Some((kind, table)) = found else {
        return Err(format!("bitsandbytes has NF4 and FP4, found {:?}", matrix.levels()));
    };
    let shape = matrix.shape();
    let count = shape.0 * shape.1;
    let mut weight = bytes_of(matrix.codes())?;
    for byte in &mut weight {
        *byte = byte.rotate_left(4);
    }
    if let (1, Some(last)) = (count % 2, weight.last_mut()) {
        // What the quantiser makes of the 0 that it adds.
        *last |= table.iter().position(|level| *level == 0.0).unwrap_or_default() as u8;
    }
    let mut state = State {
        quant_type: (*kind).to_string(),
        blocksize: matrix.group(),
        dtype: dtype.to_string(),
        shape: vec![shape.0, shape.1],
        nested_blocksize: None,
        nested_dtype: None,
        nested_offset: None,
    };
    let floats = |name: &str, tensor: &candle_core::Tensor| -> Parsed<Part> {
        let (dtype, bytes) = stored_floats(tensor)?;
        Ok(Part { name: name.to_string(), dtype, shape: tensor.dims().to_vec(), bytes })
    };
    let bytes = |name: &str, shape: Vec<usize>, bytes: Vec<u8>| Part {
        name: name.to_string(),
        dtype: "U8",
        shape,
        bytes,
    };
    let mut parts = vec![
        bytes("weight", vec![weight.len(), 1], weight),
        Part {
            name: "weight.quant_map".to_string(),
            dtype: "F32",
            shape: vec![16],
            bytes: table.iter().flat_map(|level| level.to_le_bytes()).collect(),
        },
    ];
    match matrix.scales() {
        Scales::Plain { scales, offsets: None } => {
            let scales = scales.to_dtype(candle_core::DType::F32);
            let scales = scales.map_err(|error| crate::error::tensor_message(&error))?;
            parts.push(floats("weight.absmax", &scales)?);
        }
        Scales::Nested { codes, table, scales, offset } => {
            state.nested_blocksize = Some(NESTED);
            state.nested_dtype = Some("float32".to_string());
            state.nested_offset = Some(f64::from(*offset));
            parts.push(bytes("weight.absmax", codes.dims().to_vec(), bytes_of(codes)?));
            parts.push(floats("weight.nested_absmax", scales)?);
            parts.push(floats("weight.nested_quant_map", table)?);
        }
        _ => return Err("bitsandbytes has no such scales, expected one a block".to_string()),
    }
    let state = serde_json::to_vec(&state).map_err(|error| error.to_string())?;
    parts.push(bytes(&state_name(kind), vec![state.len()], state));
    Ok(parts)
}
