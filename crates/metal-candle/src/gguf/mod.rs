//! GGUF files, as llama.cpp reads and writes them: a model with its tokenizer and chat template, or an
//! adapter, in one file.
//!
//! [`GgufFile::open`] gives what is in a file in this library's terms: the `config.json`, the tokenizer's
//! files, and tensors under the names of a checkpoint, dense or as ggml's blocks. [`write()`] makes a file of
//! the same parts. Adapters go in by [`read_adapter`] and [`save_as_peft`], and out by [`adapter_layers`] and
//! [`write_adapter`].
//!
//! What differs from a checkpoint of transformers, and is turned back here: rows of queries and keys have another
//! order for llama, Mistral, Mixtral, SmolLM 3 and Granite (`rows.rs`); 1 is added to Gemma's norms; the factors of
//! Llama 3's and Phi's ropes are tensors; a layer's experts are one tensor.

mod adapter;
mod architecture;
mod config;
mod container;
mod export;
mod pre_tokenizers;
mod rows;
#[cfg(test)]
mod testing;
mod types;
mod vocabulary;
mod writer;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use crate::files::cut;
use crate::model::{Config, Model};
use crate::text::{Tokenizer, TokenizerFiles};
use crate::{Error, Result};
pub use adapter::{AdapterLayer, adapter_layers, read_adapter, save_as_peft, write_adapter};
use architecture::Target;
use container::{Container, TensorInfo};
pub use export::{Export, ExportTensor, dense_bytes, storage, write};
pub use types::GgmlType;
pub use vocabulary::UnknownTokenizer;

/// Whether a path is that of a GGUF file, by its name.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
        && !path.is_dir()
}

/// Whether a GGUF file holds an adapter and no model.
///
/// # Errors
/// [`Error::Io`] when it cannot be read, [`Error::File`] when it isn't a GGUF file or is truncated.
pub fn holds_adapter(path: impl AsRef<Path>) -> Result<bool> {
    let file = Container::open(path.as_ref())?;
    Ok(file.text("general.type")? == Some("adapter"))
}

/// A model in a GGUF file.
///
/// The file must not be changed or shortened while this exists: it is mapped, not read.
#[derive(Debug)]
pub struct GgufFile {
    container: Container,
    target: &'static Target,
    config: Config,
    /// Where each tensor lies, by its name in a checkpoint.
    places: BTreeMap<String, Place>,
}

/// A tensor of the file, or some of its rows.
#[derive(Debug)]
struct Place {
    name: String,
    part: Part,
}

/// What of a tensor a weight is.
#[derive(Clone, Copy, Debug)]
enum Part {
    Whole,
    /// Some of its rows.
    Rows(usize, usize),
    /// One of the matrices `(experts, out, in)`.
    Expert(usize),
}

/// A tensor as a checkpoint has it: with its rows in the order of transformers, and the weights of norms without what
/// llama.cpp adds.
#[derive(Clone, Debug)]
pub struct GgufTensor<'a> {
    /// How elements are stored.
    pub kind: GgmlType,
    /// The outermost dimension first: `(out, in)`.
    pub shape: Vec<usize>,
    /// The elements or blocks, row by row.
    pub bytes: Cow<'a, [u8]>,
}

impl GgufTensor<'_> {
    /// The tensor on the CPU in its own dtype; `None` for blocks and for what is no float of 16 or 32 bits.
    pub fn dense(&self) -> Option<Result<Tensor>> {
        fn elements<T, const N: usize>(bytes: &[u8], element: fn([u8; N]) -> T) -> Vec<T> {
            bytes.as_chunks::<N>().0.iter().map(|bytes| element(*bytes)).collect()
        }
        let (bytes, shape) = (&*self.bytes, self.shape.as_slice());
        let tensor = match self.kind {
            GgmlType::F32 => {
                Tensor::from_vec(elements(bytes, f32::from_le_bytes), shape, &Device::Cpu)
            }
            GgmlType::F16 => {
                Tensor::from_vec(elements(bytes, f16::from_le_bytes), shape, &Device::Cpu)
            }
            GgmlType::BF16 => {
                Tensor::from_vec(elements(bytes, bf16::from_le_bytes), shape, &Device::Cpu)
            }
            _ => return None,
        };
        Some(tensor.map_err(Error::from))
    }
}

impl GgufFile {
    /// Opens a model. Of its tensors, only where they lie is looked at.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be read; [`Error::File`] when it isn't a GGUF file of a model, is truncated, or says
    /// what cannot be; [`Error::Unsupported`] for an architecture or a feature of one that this library doesn't have.
    /// All name the file and the key or tensor.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let container = Container::open(path.as_ref())?;
        let target = config::target_of(&container)?;
        let config = config::read(&container)?;
        let places = places(&container, &config)?;
        let file = Self { container, target, config, places };
        file.check_tensors()?;
        Ok(file)
    }

    /// Checks that all tensors belong to the model and have the shapes that the metadata ask for. One that is missing is
    /// told when it is asked for.
    fn check_tensors(&self) -> Result<()> {
        let expected: BTreeMap<String, Vec<usize>> =
            weights_of(&self.config)?.into_iter().collect();
        for (name, place) in &self.places {
            let invalid = |problem: String| {
                Error::file(self.path(), format!("tensor {:?} {problem}", cut(&place.name)))
            };
            let found = self.describe(name).map(|(_, shape)| shape);
            match (expected.get(name), found) {
                (Some(expected), Some(found)) if *expected == found => {}
                (Some(expected), found) => {
                    let found = found.unwrap_or_default();
                    return Err(invalid(format!(
                        "has shape {found:?}; the metadata ask for {expected:?}"
                    )));
                }
                (None, _) => {
                    let family = self.config.architecture.model_type();
                    return Err(invalid(format!(
                        "belongs to no part of a {family} model as the other tensors and the metadata describe it"
                    )));
                }
            }
        }
        Ok(())
    }

    /// The file, or the first of several.
    pub fn path(&self) -> &Path {
        self.container.path()
    }

    /// The files of the model: one, or the parts that `llama-gguf-split` makes.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.container.files()
    }

    /// The shape of the model; [`Config::raw`] is what a `config.json` would say.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the files of the model's tokenizer would say.
    ///
    /// # Errors
    /// [`Error::File`] when there is none or it is malformed, [`Error::Unsupported`] for a kind that this library
    /// doesn't have.
    pub fn tokenizer_files(&self) -> Result<TokenizerFiles> {
        vocabulary::read(&self.container)
    }

    /// The model's tokenizer, with its chat templates.
    ///
    /// # Errors
    /// As [`Self::tokenizer_files`].
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::from_files(self.path(), &self.tokenizer_files()?)
    }

    /// The names of all tensors in a checkpoint, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// How a tensor is stored, and its shape with the outermost dimension first.
    pub fn describe(&self, name: &str) -> Option<(GgmlType, Vec<usize>)> {
        let place = self.places.get(name)?;
        let info = self.container.tensor(&place.name)?;
        let mut shape = info.shape.clone();
        match (place.part, shape.first_mut()) {
            (Part::Rows(start, end), Some(first)) => *first = end - start,
            (Part::Expert(_), Some(_)) => drop(shape.remove(0)),
            _ => {}
        }
        Some((info.kind, shape))
    }

    /// A tensor by its name in a checkpoint. Its bytes are copied only where its rows have another order there or
    /// it is a norm of Gemma.
    ///
    /// # Errors
    /// [`Error::File`] when there is none, or its shape doesn't fit the number of heads.
    pub fn tensor(&self, name: &str) -> Result<GgufTensor<'_>> {
        let found = self
            .places
            .get(name)
            .and_then(|place| Some((place, self.container.tensor(&place.name)?)))
            .zip(self.describe(name));
        let Some(((place, info), (kind, shape))) = found else {
            let theirs = architecture::to_gguf(&self.config, name);
            let known = theirs.map_or(String::new(), |theirs| format!(" (here {theirs:?})"));
            let message = format!("tensor {:?}{known} is missing", cut(name));
            return Err(Error::file(self.path(), message));
        };
        let invalid = |message: &str| {
            Error::file(
                self.path(),
                format!("tensor {:?} has shape {:?}, {message}", cut(&place.name), info.shape),
            )
        };
        let row_bytes = row_bytes(info).ok_or_else(|| invalid("whose rows are no whole blocks"))?;
        let all = self.container.data(info);
        let rows = |start: usize, end: usize| {
            all.get(start.saturating_mul(row_bytes)..end.saturating_mul(row_bytes))
        };
        let bytes = match place.part {
            Part::Whole => all,
            Part::Rows(start, end) => rows(start, end)
                .ok_or_else(|| invalid("which is less than queries, keys and values"))?,
            Part::Expert(expert) => rows(expert, expert + 1)
                .ok_or_else(|| invalid(&format!("which has no expert {expert}")))?,
        };
        let mut bytes = Cow::Borrowed(bytes);
        if let Some(heads) =
            architecture::rotated_heads(&self.config, name).filter(|_| self.target.interleaved)
        {
            let ours = rows::deinterleave(&bytes, row_bytes, heads);
            let ours = ours.ok_or_else(|| invalid(&format!("which {heads} heads don't divide")))?;
            bytes = Cow::Owned(ours);
        }
        if self.target.shifted_norms && architecture::is_norm(name) {
            if kind != GgmlType::F32 {
                return Err(invalid(&format!("and is {kind}; llama.cpp has F32 for norms")));
            }
            bytes = Cow::Owned(shifted(&bytes, -1.0));
        }
        Ok(GgufTensor { kind, shape, bytes })
    }

    /// Gives back the memory of the file's bytes that a tensor takes, when they were copied.
    pub(crate) fn release(&self, name: &str) {
        let info = self.places.get(name).and_then(|place| self.container.tensor(&place.name));
        info.into_iter().for_each(|info| self.container.release(info));
    }
}

/// The names of a model's weights in a checkpoint, and their shapes.
fn weights_of(config: &Config) -> Result<Vec<(String, Vec<usize>)>> {
    let mut weights = Vec::new();
    Model::from_fn(config.clone(), DType::F32, &Device::Cpu, |name, shape| {
        weights.push((name.to_string(), shape.to_vec()));
        // In its shape, without its memory.
        Ok(Tensor::zeros((), DType::F32, &Device::Cpu)?.broadcast_as(shape)?)
    })?;
    Ok(weights)
}

/// An error of what a file says about its model's shape, told of the file.
fn about(path: &Path, error: Error) -> Error {
    let told = |message: String| match message.strip_prefix("config.json: ") {
        Some(rest) => rest.to_string(),
        None => message,
    };
    match error {
        Error::File { message, .. } => {
            Error::file(path, format!("as a config.json: {}", told(message)))
        }
        Error::Unsupported(message) => {
            Error::Unsupported(format!("{}: as a config.json: {}", path.display(), told(message)))
        }
        other => other,
    }
}

/// The bytes of a row; a vector's rows are its elements.
fn row_bytes(info: &TensorInfo) -> Option<usize> {
    match info.shape.as_slice() {
        [_] => info.kind.is_dense().then(|| info.kind.block_bytes()),
        [_, inner @ ..] => info.kind.tensor_bytes(inner),
        [] => None,
    }
}

/// F32 elements plus `offset`.
fn shifted(bytes: &[u8], offset: f32) -> Vec<u8> {
    let (values, _) = bytes.as_chunks::<4>();
    values.iter().flat_map(|value| (f32::from_le_bytes(*value) + offset).to_le_bytes()).collect()
}

/// Finds the name of each tensor in a checkpoint. Where query, key and value are one tensor though the family has
/// three, their rows are told apart.
fn places(container: &Container, config: &Config) -> Result<BTreeMap<String, Place>> {
    let mut places = BTreeMap::new();
    for (name, _) in container.tensors() {
        if config::ROPE_TENSORS.contains(&name) {
            continue;
        }
        let mut add = |ours: String, part| {
            let place = Place { name: name.to_string(), part };
            match places.insert(ours, place) {
                None => Ok(()),
                Some(other) => Err(Error::file(
                    container.path(),
                    format!(
                        "tensors {:?} and {:?} are the same weight",
                        cut(name),
                        cut(&other.name)
                    ),
                )),
            }
        };
        if let Some(ours) = architecture::from_gguf(config, name) {
            add(ours, Part::Whole)?;
        } else if let Some(experts) = architecture::experts_from_gguf(config, name) {
            for (expert, ours) in experts.into_iter().enumerate() {
                add(ours, Part::Expert(expert))?;
            }
        } else if let Some((layer, kind)) = fused(name) {
            let (q, k) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
            let parts = [("q", 0, q), ("k", q, q + k), ("v", q + k, q + 2 * k)];
            for (part, start, end) in parts {
                let ours = format!("model.layers.{layer}.self_attn.{part}_proj.{kind}");
                add(ours, Part::Rows(start, end))?;
            }
        } else {
            return Err(Error::Unsupported(format!(
                "{}: tensor {:?} belongs to no part of a {} model",
                container.path().display(),
                cut(name),
                config.architecture.model_type()
            )));
        }
    }
    Ok(places)
}

/// The layer, and weight or bias, of query, key and value in one.
fn fused(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("blk.")?.split_once(".attn_qkv.")
}

#[cfg(test)]
mod tests {
    use super::testing::fixture;
    use super::writer::{Metadata, write_container};
    use super::*;

    #[test]
    fn query_key_and_value_in_one_tensor_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let config = fixture("llama3");
        let mut metadata = Metadata::default();
        config::write(&config, &mut metadata).unwrap();
        let (q, k, width) = (48, 24, 48);
        let tensors = [
            ("blk.0.attn_qkv.weight".to_string(), vec![q + 2 * k, width], GgmlType::F32),
            ("blk.0.attn_qkv.bias".to_string(), vec![q + 2 * k], GgmlType::F32),
            // With it, there are biases.
            ("blk.0.attn_output.bias".to_string(), vec![width], GgmlType::F32),
        ];
        // Each row has its number.
        let rows = |width: usize| -> Vec<u8> {
            (0..q + 2 * k)
                .flat_map(|row| [row as f32; 1].repeat(width))
                .flat_map(f32::to_le_bytes)
                .collect()
        };
        write_container(&path, &metadata, &tensors, |index| {
            Ok(match index {
                2 => vec![0; 4 * width],
                _ => rows([width, 1][index]),
            })
        })
        .unwrap();
        // Without it, those of query, key and value belong to nothing.
        let lone = folder.path().join("b.gguf");
        write_container(&lone, &metadata, &tensors[1..2], |_| Ok(rows(1))).unwrap();
        let error = GgufFile::open(&lone).unwrap_err().to_string();
        assert!(error.contains("belongs to no part of a llama model as"), "{error}");
        let narrow = [("output_norm.weight".to_string(), vec![3], GgmlType::F32)];
        write_container(&lone, &metadata, &narrow, |_| Ok(vec![0; 12])).unwrap();
        let error = GgufFile::open(&lone).unwrap_err().to_string();
        assert!(error.contains("has shape [3]; the metadata ask for [48]"), "{error}");
        let file = GgufFile::open(&path).unwrap();
        let first = |name: &str| -> Vec<f32> {
            let name = format!("model.layers.0.self_attn.{name}");
            let tensor = file.tensor(&name).unwrap();
            let (rows, shape) = (tensor.shape[0], tensor.shape.clone());
            assert_eq!(file.describe(&name).unwrap().1, shape);
            let dense = tensor.dense().unwrap().unwrap().reshape((rows, ())).unwrap();
            dense.narrow(1, 0, 1).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        for kind in ["weight", "bias"] {
            let query = first(&format!("q_proj.{kind}"));
            assert_eq!(query[..7], [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 1.0]);
            assert_eq!(first(&format!("k_proj.{kind}"))[..2], [48.0, 50.0]);
            let value: Vec<f32> = (72..96).map(|row| row as f32).collect();
            assert_eq!(first(&format!("v_proj.{kind}")), value);
        }
        // A weight that comes as itself, too.
        let twice = [
            tensors[0].clone(),
            ("blk.0.attn_k.weight".to_string(), vec![k, width], GgmlType::F32),
        ];
        write_container(&path, &metadata, &twice, |index| {
            Ok(vec![0; 4 * width * [q + 2 * k, k][index]])
        })
        .unwrap();
        let error = GgufFile::open(&path).unwrap_err().to_string();
        assert!(error.contains("are the same weight"), "{error}");
        // Too few rows for three.
        let short = [("blk.0.attn_qkv.weight".to_string(), vec![q, width], GgmlType::F32)];
        write_container(&path, &metadata, &short, |_| Ok(vec![0; 4 * q * width])).unwrap();
        let file = GgufFile::open(&path).unwrap();
        let error = file.tensor("model.layers.0.self_attn.v_proj.weight").unwrap_err().to_string();
        assert!(error.contains("less than queries, keys and values"), "{error}");
    }

    #[test]
    fn what_is_no_model_of_ours_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let open = |change: &dyn Fn(&mut Metadata), tensor: &str| {
            let mut metadata = Metadata::default();
            change(&mut metadata);
            let tensors = [(tensor.to_string(), vec![128, 48], GgmlType::F32)];
            write_container(&path, &metadata, &tensors, |_| Ok(vec![0; 4 * 128 * 48])).unwrap();
            GgufFile::open(&path).unwrap_err().to_string()
        };
        let whole = |metadata: &mut Metadata| drop(config::write(&fixture("llama3"), metadata));
        let embedding = "token_embd.weight";
        for (error, expected) in [
            (open(&|_| {}, embedding), "general.architecture: missing"),
            (
                open(&|it| it.text("general.architecture", "rwkv6"), embedding),
                "general.architecture = \"rwkv6\"; the supported architectures are llama",
            ),
            (
                open(&|it| it.text("general.architecture", "llama"), embedding),
                "llama.embedding_length: missing",
            ),
            (
                open(
                    &|it| {
                        whole(it);
                        it.text("general.type", "mmproj")
                    },
                    embedding,
                ),
                "general.type: is \"mmproj\"",
            ),
            (
                open(
                    &|it| {
                        whole(it);
                        it.count("llama.expert_shared_count", 1).unwrap()
                    },
                    embedding,
                ),
                "llama.expert_shared_count: asks for what",
            ),
            (
                open(
                    &|it| {
                        whole(it);
                        it.count("llama.expert_count", 8).unwrap()
                    },
                    embedding,
                ),
                "llama.expert_used_count: missing",
            ),
            (open(&whole, "blk.0.ffn_gate_inp.weight"), "belongs to no part of a llama model"),
        ] {
            assert!(error.contains(expected), "{error} lacks {expected}");
            assert!(error.contains("a.gguf"), "{error}");
        }
    }
}
