//! A checkpoint's tensors, read from safetensors files.
//!
//! A [safetensors](https://github.com/huggingface/safetensors) file is eight bytes of header
//! length, a JSON header that gives each tensor its dtype, shape and place, and the values. The
//! files are mapped into memory, so opening a checkpoint costs its headers alone. Everything a
//! header claims is checked against the file before a byte of data is touched or allocated for.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs;
use std::ops::{Bound, Range};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Shape, Tensor};
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use crate::files::{cut, cut_to};
use crate::{Error, Result, files};

/// The largest header that is read, in bytes; the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The tensors of one or more safetensors files, by name.
///
/// The files must not be changed or shortened while this exists: they are mapped, not read.
pub struct Weights {
    files: Vec<(PathBuf, Mmap)>,
    entries: BTreeMap<String, Entry>,
    check_finite: bool,
}

/// A tensor as a safetensors file has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored<'a> {
    /// `F32`, `U8`, `F8_E4M3` ...
    pub(crate) dtype: &'a str,
    pub(crate) shape: &'a [usize],
    /// As many as dtype and shape ask for.
    pub(crate) bytes: &'a [u8],
}

struct Entry {
    file: usize,
    /// Byte range in the file.
    start: usize,
    end: usize,
    dtype: String,
    shape: Vec<usize>,
    read: AtomicBool,
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let files = self.files.iter().map(|(path, _)| path).collect::<Vec<_>>();
        f.debug_struct("Weights")
            .field("files", &files)
            .field("tensors", &self.entries.len())
            .finish_non_exhaustive()
    }
}

impl Weights {
    /// Opens the checkpoint in a model's folder: `model.safetensors`, or the shards that
    /// `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// [`Error::File`] when there is neither, saying what there is instead; when the index names a
    /// shard or a tensor that is not there; and those of [`Self::from_files`].
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let single = folder.join(SINGLE);
        if single.exists() {
            return Self::from_files([single]);
        }
        let index_path = folder.join(INDEX);
        if !index_path.exists() {
            return Err(no_weights(folder));
        }
        let index: Index = files::read_json(&index_path)?;
        let names = index.weight_map.values().collect::<BTreeSet<_>>();
        if names.is_empty() {
            return Err(Error::file(&index_path, "weight_map is empty; it should list tensors"));
        }
        let mut shards = Vec::new();
        let mut absent = Vec::new();
        for name in names {
            // A shard lies beside its index. Anything else would read files the model has no
            // business with.
            if Path::new(name).file_name() != Some(name.as_ref()) || name.contains('\\') {
                return Err(Error::file(
                    &index_path,
                    format!(
                        "weight_map names the file {:?}; expected a name without folders",
                        cut(name)
                    ),
                ));
            }
            let path = folder.join(name);
            if path.exists() { shards.push(path) } else { absent.push(name.as_str()) }
        }
        if !absent.is_empty() {
            return Err(Error::file(
                &index_path,
                format!(
                    "{} of {} shards are missing from {}: {}; download them again",
                    absent.len(),
                    absent.len() + shards.len(),
                    folder.display(),
                    cut_to(&absent.join(", "), 300)
                ),
            ));
        }
        let weights = Self::from_files(shards)?;
        for (name, file) in &index.weight_map {
            let found = weights.entries.get(name).map(|entry| weights.path(entry));
            if found != Some(&folder.join(file)) {
                let found = found.map_or("no file".into(), |path| path.display().to_string());
                return Err(Error::file(
                    &index_path,
                    format!(
                        "tensor {:?} should be in {}, but {found} has it",
                        cut(name),
                        cut(file)
                    ),
                ));
            }
        }
        Ok(weights)
    }

    /// Opens the checkpoint made of these files.
    ///
    /// # Errors
    /// [`Error::Io`] when a file cannot be read; [`Error::File`] when a header is not JSON, claims
    /// sizes that the file or the shapes contradict, the file is truncated, or two files have a
    /// tensor of one name.
    pub fn from_files(paths: impl IntoIterator<Item = impl AsRef<Path>>) -> Result<Self> {
        let mut weights = Self { files: Vec::new(), entries: BTreeMap::new(), check_finite: true };
        for path in paths {
            let path = path.as_ref();
            let (file, metadata) = files::open_regular(path)?;
            if metadata.len() < 8 {
                return Err(Error::file(
                    path,
                    format!(
                        "has {} bytes; a safetensors file has at least 8. Download it again",
                        metadata.len()
                    ),
                ));
            }
            // SAFETY: a mapping is only unsound to read when the file changes meanwhile. Like
            // every program that maps checkpoints, this one asks its user not to do that.
            let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
            let index = weights.files.len();
            for (name, mut entry) in parse(path, &map)? {
                if let Some(other) = weights.entries.get(&name) {
                    return Err(Error::file(
                        path,
                        format!(
                            "tensor {name:?} is also in {}; a checkpoint has each tensor once",
                            weights.path(other).display()
                        ),
                    ));
                }
                entry.file = index;
                weights.entries.insert(name, entry);
            }
            weights.files.push((path.to_path_buf(), map));
        }
        Ok(weights)
    }

    /// Whether [`Self::tensor`] refuses NaN and infinite values, and finite ones that become
    /// infinite in the dtype asked for. It does unless told otherwise; the check is part of the
    /// copy.
    pub fn check_finite(mut self, check: bool) -> Self {
        self.check_finite = check;
        self
    }

    /// Takes a tensor `(count, ..)` apart into as many, each with a name of its own.
    ///
    /// # Errors
    /// [`Error::File`] when there is none, it has another number of them, or one of the names is there already.
    pub(crate) fn unstack(
        &mut self,
        stacked: &str,
        count: usize,
        name: impl Fn(usize) -> String,
    ) -> Result<()> {
        let entry = self.entry(stacked)?;
        let (file, start, bytes) = (entry.file, entry.start, entry.end - entry.start);
        let (dtype, shape) = (entry.dtype.clone(), entry.shape.clone());
        let place = self.path(entry).clone();
        let problem =
            |problem: String| Error::file(&place, format!("tensor {stacked:?} {problem}"));
        let inner = match shape.split_first() {
            Some((first, inner)) if *first == count && bytes.is_multiple_of(count) => inner,
            _ => {
                let expected =
                    format!("has shape {shape:?}, expected {count} in the first dimension");
                return Err(problem(expected));
            }
        };
        let size = bytes / count;
        self.entries.remove(stacked);
        for index in 0..count {
            let start = start + index * size;
            let (dtype, shape, read) = (dtype.clone(), inner.to_vec(), AtomicBool::new(false));
            let entry = Entry { file, start, end: start + size, dtype, shape, read };
            let name = name(index);
            if self.entries.contains_key(&name) {
                return Err(problem(format!("has the weight {name:?}, which is there once more")));
            }
            self.entries.insert(name, entry);
        }
        Ok(())
    }

    /// The files that hold the tensors.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(path, _)| path.as_path())
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// A tensor's shape.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.entries.get(name)?.shape)
    }

    /// The dtype a tensor is stored in.
    ///
    /// # Errors
    /// [`Error::File`] when there is no such tensor, [`Error::Unsupported`] when its dtype is not
    /// f32, f16 or bf16.
    pub fn dtype(&self, name: &str) -> Result<DType> {
        let entry = self.entry(name)?;
        self.float_dtype(name, entry)
    }

    /// The names of the tensors that [`Self::tensor`] has not given yet. After a model is built,
    /// these are what it does not use.
    pub fn unread(&self) -> Vec<&str> {
        self.entries
            .iter()
            .filter(|(_, entry)| !entry.read.load(Ordering::Relaxed))
            .map(|(name, _)| name.as_str())
            .collect()
    }

    /// Reads a tensor of f32, f16 or bf16, converted to `dtype` (one of these too) on `device`.
    ///
    /// # Errors
    /// [`Error::File`] naming the file and the tensor, when it is missing (with names that are
    /// close), has another shape, or has a NaN or infinite value (with its place);
    /// [`Error::Unsupported`] for another dtype on either side, such as those of quantised
    /// checkpoints; [`Error::Tensor`] when the device has no room.
    pub fn tensor(
        &self,
        name: &str,
        expected_shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let (entry, stored) = self.fitting(name, expected_shape)?;
        let path = self.path(entry);
        let bytes = self.bytes_of(name, entry)?;
        let (tensor, all_finite) = converted(bytes, stored, expected_shape, dtype)?;
        if self.check_finite && !all_finite {
            return Err(Error::file(path, not_finite(name, bytes, stored, dtype)));
        }
        let tensor = tensor.to_device(device)?;
        self.done_with(entry);
        Ok(tensor)
    }

    /// As [`Self::tensor`], of a matrix `(rows, columns)` the rows (`dim` 0) or columns (`dim` 1) in these ranges, one after
    /// the other, on the CPU. Nothing else is looked at.
    ///
    /// # Errors
    /// As [`Self::tensor`].
    pub(crate) fn part(
        &self,
        name: &str,
        expected_shape: [usize; 2],
        (dim, ranges): (usize, &[Range<usize>]),
        dtype: DType,
    ) -> Result<Tensor> {
        let (entry, stored) = self.fitting(name, &expected_shape)?;
        let bytes = self.bytes_of(name, entry)?;
        let [mut rows, mut columns] = expected_shape;
        let row = columns * stored.size_in_bytes();
        let length = ranges.iter().map(ExactSizeIterator::len).sum();
        let part: Cow<[u8]> = if dim == 0 {
            rows = length;
            pieces(name, bytes, row, ranges)?
        } else {
            let size = stored.size_in_bytes();
            if ranges.iter().any(|range| range.end > columns) {
                return Err(no_part(name, ranges));
            }
            columns = length;
            let mut part = vec![0; rows * columns * size];
            let targets = part.par_chunks_exact_mut((columns * size).max(1));
            targets.zip(bytes.par_chunks_exact(row.max(1))).for_each(|(target, row)| {
                let mut done = 0;
                for range in ranges {
                    let from = &row[range.start * size..range.end * size];
                    target[done..done + from.len()].copy_from_slice(from);
                    done += from.len();
                }
            });
            part.into()
        };
        let (tensor, all_finite) = converted(&part, stored, &[rows, columns], dtype)?;
        if self.check_finite && !all_finite {
            // With its place in the whole.
            return self.tensor(name, &expected_shape, dtype, &Device::Cpu);
        }
        self.done_with(entry);
        Ok(tensor)
    }

    /// As [`Self::tensor`], of `count` numbers those in these ranges, one after the other, on the CPU. All are looked at, so
    /// that whoever reads other ranges has the same error.
    ///
    /// # Errors
    /// As [`Self::tensor`].
    pub(crate) fn elements(
        &self,
        name: &str,
        count: usize,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Tensor> {
        /// Bytes that are looked at at once.
        const LOOKED_AT: usize = 64 << 20;
        let (entry, stored) = self.fitting(name, &[count])?;
        let bytes = self.bytes_of(name, entry)?;
        let is_finite = |bytes| to_f32(bytes, stored).1;
        if self.check_finite && !bytes.chunks(LOOKED_AT).all(is_finite) {
            return Err(Error::file(self.path(entry), not_finite(name, bytes, stored, dtype)));
        }
        let part = pieces(name, bytes, stored.size_in_bytes(), ranges)?;
        let length = ranges.iter().map(ExactSizeIterator::len).sum();
        let (tensor, _) = converted(&part, stored, &[length], dtype)?;
        self.done_with(entry);
        Ok(tensor)
    }

    /// In the place of [`Self::tensor`]: only looks at the header, whether there is a tensor of this shape.
    ///
    /// # Errors
    /// As [`Self::tensor`], but for those of values.
    pub(crate) fn outline(&self, name: &str, expected_shape: &[usize]) -> Result<()> {
        let (entry, _) = self.fitting(name, expected_shape)?;
        entry.read.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The entry of a tensor, if it has that shape, and the dtype that it is stored in.
    fn fitting(&self, name: &str, expected_shape: &[usize]) -> Result<(&Entry, DType)> {
        let entry = self.entry(name)?;
        let stored = self.float_dtype(name, entry)?;
        if entry.shape != expected_shape {
            return Err(Error::file(
                self.path(entry),
                format!(
                    "tensor {name:?} has shape {:?}; config.json asks for {expected_shape:?}",
                    entry.shape
                ),
            ));
        }
        Ok((entry, stored))
    }

    /// The tensor `name` of `count` bytes, u8, as the state of an optimiser has it.
    ///
    /// # Errors
    /// [`Error::File`] when it is missing, is of another type or has another shape.
    pub(crate) fn bytes(&self, name: &str, count: usize, device: &Device) -> Result<Tensor> {
        let stored = self.stored(name)?;
        if stored.dtype != "U8" || stored.shape != [count] {
            return Err(Error::file(
                self.place_of(name),
                format!(
                    "tensor {name:?} is {} of shape {:?}, expected U8 of shape [{count}]",
                    stored.dtype, stored.shape
                ),
            ));
        }
        let tensor = Tensor::from_slice(stored.bytes, count, device)?;
        self.release_entry(self.entry(name)?);
        Ok(tensor)
    }

    /// A tensor of any dtype as it lies in its file.
    ///
    /// # Errors
    /// [`Error::File`] when there is no such tensor.
    pub(crate) fn stored(&self, name: &str) -> Result<Stored<'_>> {
        let entry = self.entry(name)?;
        let bytes = self.bytes_of(name, entry)?;
        entry.read.store(true, Ordering::Relaxed);
        Ok(Stored { dtype: &entry.dtype, shape: &entry.shape, bytes })
    }

    /// Gives back the memory of the file's bytes that all tensors take whose names begin so, when they were copied.
    pub(crate) fn release_all_of(&self, beginning: &str) {
        let from_there =
            self.entries.range::<str, _>((Bound::Included(beginning), Bound::Unbounded));
        for (_, entry) in from_there.take_while(|(name, _)| name.starts_with(beginning)) {
            self.release_entry(entry);
        }
    }

    fn release_entry(&self, entry: &Entry) {
        if let Some((_, map)) = self.files.get(entry.file) {
            files::release(map, entry.start..entry.end);
        }
    }

    /// Notes that a tensor was read and copied.
    fn done_with(&self, entry: &Entry) {
        entry.read.store(true, Ordering::Relaxed);
        self.release_entry(entry);
    }

    /// The file that has a tensor, or what stands for all files.
    pub(crate) fn place_of(&self, name: &str) -> PathBuf {
        self.entries.get(name).map_or_else(|| self.place(), |entry| self.path(entry).clone())
    }

    fn bytes_of(&self, name: &str, entry: &Entry) -> Result<&[u8]> {
        let bytes = self.files.get(entry.file).and_then(|(_, map)| map.get(entry.start..entry.end));
        bytes.ok_or_else(|| {
            Error::file(self.path(entry), format!("tensor {name:?} lies outside the file"))
        })
    }

    fn path(&self, entry: &Entry) -> &PathBuf {
        // An entry is only made together with its file.
        &self.files[entry.file].0
    }

    /// The files, for an error that is about all of them.
    fn place(&self) -> PathBuf {
        match self.files.as_slice() {
            [] => PathBuf::from("checkpoint"),
            [(path, _)] => path.clone(),
            [(path, _), ..] => path.parent().unwrap_or(path).to_path_buf(),
        }
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries.get(name).ok_or_else(|| {
            let close = close_names(name, self.names());
            let hint = if close.is_empty() {
                format!("none of its {} tensors has a name like it", self.entries.len())
            } else {
                format!("close names are {}", close.join(", "))
            };
            Error::file(self.place(), format!("tensor {name:?} is missing; {hint}"))
        })
    }

    fn float_dtype(&self, name: &str, entry: &Entry) -> Result<DType> {
        match entry.dtype.as_str() {
            "F32" => Ok(DType::F32),
            "F16" => Ok(DType::F16),
            "BF16" => Ok(DType::BF16),
            other => Err(Error::Unsupported(format!(
                "{}: tensor {name:?} is stored as {other}, expected F32, F16 or BF16; of a quantised checkpoint \
                 config.json says how, and which parts a matrix has",
                self.path(entry).display()
            ))),
        }
    }
}

/// Values that are stored in a dtype, in another one, and whether all are finite.
fn converted(bytes: &[u8], stored: DType, shape: &[usize], dtype: DType) -> Result<(Tensor, bool)> {
    let (shape, cpu) = (Shape::from(shape.to_vec()), &Device::Cpu);
    Ok(match dtype {
        DType::F32 => {
            let (values, finite) = to_f32(bytes, stored);
            (Tensor::from_vec(values, shape, cpu)?, finite)
        }
        DType::F16 => {
            let (bits, finite) = to_f16_bits(bytes, stored);
            (Tensor::from_vec(bits.reinterpret_into::<f16>(), shape, cpu)?, finite)
        }
        DType::BF16 => {
            let (bits, finite) = to_bf16_bits(bytes, stored);
            (Tensor::from_vec(bits.reinterpret_into::<bf16>(), shape, cpu)?, finite)
        }
        other => {
            return Err(Error::Unsupported(format!(
                "weights in {other:?}; f32, f16 and bf16 are supported"
            )));
        }
    })
}

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// A tensor in a safetensors header.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A safetensors header, in which a name that comes twice is an error and not the last one wins.
struct Header(Vec<(String, Info)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = Vec::new();
                let mut seen = BTreeSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(serde::de::Error::custom(format!("{name:?} comes twice")));
                    }
                    if name == "__metadata__" {
                        map.next_value::<Option<HashMap<String, String>>>()?;
                    } else {
                        tensors.push((name, map.next_value()?));
                    }
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// The bits of an element, for the dtypes that the format has.
fn element_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ"
        | "F8_E5M2FNUZ" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// Reads and checks a file's header. `file` of the entries is left at 0.
fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<(String, Entry)>> {
    let invalid = |message: String| Error::file(path, message);
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(invalid(format!("has {} bytes; expected at least 8", bytes.len())));
    };
    let length = u64::from_le_bytes(*length);
    let fits = length <= MAX_HEADER_BYTES && length <= rest.len() as u64;
    if let Some(what) =
        files::describe_content(bytes).filter(|it| !fits && *it != files::SAFETENSORS)
    {
        return Err(invalid(format!("is {what}; a safetensors file was expected")));
    }
    if length > MAX_HEADER_BYTES {
        return Err(invalid(format!(
            "claims a header of {length} bytes, more than the {MAX_HEADER_BYTES} of the format; \
             this is not a safetensors file"
        )));
    }
    let header_len = length as usize;
    let Some((header, data)) = rest.split_at_checked(header_len) else {
        return Err(invalid(format!(
            "claims a header of {length} bytes, but only {} follow; the file is truncated or not a \
             safetensors file. Download it again",
            rest.len()
        )));
    };
    let Header(tensors) = files::parse_json(header)
        .map_err(|message| invalid(format!("the safetensors header is malformed: {message}")))?;

    let mut entries = Vec::with_capacity(tensors.len());
    for (name, info) in tensors {
        let (start, end) = info.data_offsets;
        let invalid = |message: String| invalid(format!("tensor {name:?}: {message}"));
        let Some(bits) = element_bits(&info.dtype) else {
            return Err(invalid(format!("has dtype {:?}, which is unknown", info.dtype)));
        };
        let size = info
            .shape
            .iter()
            .try_fold(bits, |product, dim| product.checked_mul(*dim))
            .ok_or_else(|| invalid(format!("its shape {:?} overflows", info.shape)))?;
        if size % 8 != 0 || end.checked_sub(start) != Some(size / 8) {
            return Err(invalid(format!(
                "shape {:?} of {} is {} bytes, but data_offsets are [{start}, {end}]",
                info.shape,
                info.dtype,
                size.div_ceil(8)
            )));
        }
        if end > data.len() as u64 {
            return Err(invalid(format!(
                "ends at byte {end} of the data, but the file has {}; it is truncated. Download it \
                 again",
                data.len()
            )));
        }
        // Both are at most the file's length, which fits.
        let offset = 8 + header_len;
        entries.push((
            name,
            Entry {
                file: 0,
                start: offset + start as usize,
                end: offset + end as usize,
                dtype: info.dtype,
                shape: info.shape.iter().map(|dim| *dim as usize).collect(),
                read: AtomicBool::new(false),
            },
        ));
    }
    // The format allows neither gaps nor overlaps: both hide a wrong header.
    entries.sort_by_key(|(_, entry)| (entry.start, entry.end));
    let mut expected = 8 + header_len;
    for (name, entry) in &entries {
        if entry.start != expected {
            return Err(invalid(format!(
                "tensor {name:?} starts at byte {}; expected {expected}, where the one before ends",
                entry.start
            )));
        }
        expected = entry.end;
    }
    if expected != bytes.len() {
        return Err(invalid(format!(
            "has {} bytes; its header accounts for {expected}. Download it again",
            bytes.len()
        )));
    }
    Ok(entries)
}

/// Elements a thread converts at a time.
const CHUNK: usize = 1 << 15;

/// Converts little-endian elements of `N` bytes into `out`, in parallel. Gives whether all that
/// were written are finite.
fn convert<T: Copy + Send, const N: usize>(
    bytes: &[u8],
    out: &mut [T],
    element: impl Fn([u8; N]) -> T + Sync,
    finite: impl Fn(T) -> bool + Sync,
) -> bool {
    out.par_chunks_mut(CHUNK)
        .zip(bytes.par_chunks(CHUNK * N))
        .map(|(out, bytes)| {
            let (elements, _) = bytes.as_chunks::<N>();
            let mut all_finite = true;
            for (out, bytes) in out.iter_mut().zip(elements) {
                *out = element(*bytes);
                all_finite &= finite(*out);
            }
            all_finite
        })
        .reduce(|| true, |a, b| a & b)
}

fn bf16_to_f32(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

fn f16_to_f32(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

fn f16_is_finite(bits: u16) -> bool {
    bits & 0x7c00 != 0x7c00
}

fn bf16_is_finite(bits: u16) -> bool {
    bits & 0x7f80 != 0x7f80
}

// The vectors below start as zeros of a primitive type, which the system gives without writing
// them, so each byte is written once.

fn to_f32(bytes: &[u8], stored: DType) -> (Vec<f32>, bool) {
    let mut out = vec![0f32; bytes.len() / stored.size_in_bytes()];
    let finite = match stored {
        DType::F16 => convert(bytes, &mut out, f16_to_f32, f32::is_finite),
        DType::BF16 => convert(bytes, &mut out, bf16_to_f32, f32::is_finite),
        _ => convert(bytes, &mut out, f32::from_le_bytes, f32::is_finite),
    };
    (out, finite)
}

fn to_f16_bits(bytes: &[u8], stored: DType) -> (Vec<u16>, bool) {
    let mut out = vec![0u16; bytes.len() / stored.size_in_bytes()];
    let round = |value: f32| f16::from_f32(value).to_bits();
    let finite = match stored {
        DType::F16 => convert(bytes, &mut out, u16::from_le_bytes, f16_is_finite),
        DType::BF16 => convert(bytes, &mut out, |b| round(bf16_to_f32(b)), f16_is_finite),
        _ => convert(bytes, &mut out, |b| round(f32::from_le_bytes(b)), f16_is_finite),
    };
    (out, finite)
}

fn to_bf16_bits(bytes: &[u8], stored: DType) -> (Vec<u16>, bool) {
    let mut out = vec![0u16; bytes.len() / stored.size_in_bytes()];
    let round = |value: f32| bf16::from_f32(value).to_bits();
    let finite = match stored {
        DType::F16 => convert(bytes, &mut out, |b| round(f16_to_f32(b)), bf16_is_finite),
        DType::BF16 => convert(bytes, &mut out, u16::from_le_bytes, bf16_is_finite),
        _ => convert(bytes, &mut out, |b| round(f32::from_le_bytes(b)), bf16_is_finite),
    };
    (out, finite)
}

/// The message about the first value that is not finite, as stored or once converted.
fn not_finite(name: &str, bytes: &[u8], stored: DType, dtype: DType) -> String {
    let becomes = |value: f32| match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    };
    let (values, _) = to_f32(bytes, stored);
    match values.iter().enumerate().find(|(_, value)| !becomes(**value).is_finite()) {
        Some((index, value)) if value.is_finite() => format!(
            "tensor {name:?} has {value} at flat index {index}, which does not fit into {dtype:?}; \
             load the model as f32 or bf16"
        ),
        Some((index, value)) => format!(
            "tensor {name:?} has {value} at flat index {index}; the checkpoint is damaged or comes \
             from a training that diverged"
        ),
        None => format!("tensor {name:?} has values that are not finite"),
    }
}

/// Up to three names that differ little from `name`, closest first.
fn close_names<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let limit = name.len() / 3;
    let mut close = names
        .filter(|other| other.len().abs_diff(name.len()) <= limit)
        .map(|other| (strsim::levenshtein(name, other), other))
        .filter(|(distance, _)| *distance <= limit)
        .collect::<Vec<_>>();
    close.sort();
    close.into_iter().take(3).map(|(_, name)| name).collect()
}

/// The error for a folder without safetensors, saying what it has instead.
fn no_weights(folder: &Path) -> Error {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => return Error::io(folder)(error),
    };
    let mut names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect::<Vec<_>>();
    names.sort();
    let some = |test: fn(&str) -> bool| names.iter().find(|name| test(name));
    let found = if let Some(name) =
        some(|name| name.starts_with("adapter_model.") || name.ends_with("adapters.safetensors"))
    {
        format!("found {name}, an adapter; give the folder of its base model")
    } else if let Some(name) = some(|name| name.ends_with(".safetensors")) {
        format!(
            "found {name}; one file must be called {SINGLE}, and several need {INDEX} beside them"
        )
    } else if let Some(name) = some(|name| name.ends_with(".gguf")) {
        format!("found {name}, in GGUF; take the model's safetensors checkpoint instead")
    } else if let Some(name) =
        some(|name| [".bin", ".pt", ".pth"].iter().any(|ending| name.ends_with(ending)))
    {
        format!(
            "found {name}, in PyTorch's format; convert it with transformers: \
             AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder, \
             safe_serialization=True)"
        )
    } else if let Some(name) =
        some(|name| [".npz", ".h5", ".msgpack", ".onnx"].iter().any(|end| name.ends_with(end)))
    {
        format!("found {name}; take the model's safetensors checkpoint instead")
    } else {
        "no weights in any format were found".to_string()
    };
    Error::file(folder, format!("there is neither {SINGLE} nor {INDEX} here: {found}"))
}

/// The elements in these ranges, each of so many bytes.
fn pieces<'a>(
    name: &str,
    bytes: &'a [u8],
    size: usize,
    ranges: &[Range<usize>],
) -> Result<Cow<'a, [u8]>> {
    let parts = ranges.iter().map(|range| bytes.get(range.start * size..range.end * size));
    let parts = parts.collect::<Option<Vec<_>>>().ok_or_else(|| no_part(name, ranges))?;
    Ok(match parts[..] {
        [part] => part.into(),
        _ => parts.concat().into(),
    })
}

fn no_part(name: &str, ranges: &[Range<usize>]) -> Error {
    Error::option(name, format!("has no part {ranges:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::files::write_safetensors;

    /// A file of this header and so many bytes of data.
    fn file(folder: &Path, header: &str, data: usize) -> PathBuf {
        let path = folder.join("model.safetensors");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn refusal(folder: &Path) -> String {
        Weights::open(folder).unwrap_err().to_string()
    }

    fn named(name: &str, values: &[f32], dtype: DType) -> (String, Tensor) {
        let tensor = Tensor::new(values, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        (name.to_string(), tensor)
    }

    #[test]
    fn every_conversion_gives_what_candle_gives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let floats = [DType::F32, DType::F16, DType::BF16];
        // More than one chunk, and a rest.
        let values = (0..CHUNK + 7).map(|i| (i as f32 - 500.0) / 77.0).collect::<Vec<_>>();
        // The odd byte in front leaves the data of the last tensors unaligned.
        let odd = ("odd".to_string(), Tensor::new(&[1u8], &Device::Cpu).unwrap());
        for stored in floats {
            let tensors = [odd.clone(), named("x", &values, stored)];
            write_safetensors(&path, &tensors, None).unwrap();
            let weights = Weights::open(folder.path()).unwrap();
            assert_eq!(weights.shape("x"), Some(&[values.len()][..]));
            assert_eq!(weights.dtype("x").unwrap(), stored);
            assert_eq!(weights.unread(), ["odd", "x"]);
            for dtype in floats {
                let read = weights.tensor("x", &[values.len()], dtype, &Device::Cpu).unwrap();
                let expected = tensors[1].1.to_dtype(dtype).unwrap();
                assert_eq!(read.dtype(), dtype);
                let f32s = |t: &Tensor| t.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
                assert_eq!(f32s(&read), f32s(&expected), "{stored:?} to {dtype:?}");
            }
            assert_eq!(weights.unread(), ["odd"]);
        }
    }

    #[test]
    #[allow(clippy::single_range_in_vec_init)]
    fn parts_are_those_of_the_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut values = (0..12 * 10).map(|i| i as f32 - 50.5).collect::<Vec<_>>();
        let floats = [DType::F32, DType::F16, DType::BF16];
        let cases: [(usize, &[Range<usize>]); 5] =
            [(0, &[0..12]), (0, &[3..7]), (0, &[0..1, 5..9]), (1, &[4..10]), (1, &[0..2, 7..8])];
        for stored in floats {
            let whole = named("x", &values, stored).1.reshape((12, 10)).unwrap();
            write_safetensors(&path, &[("x".to_string(), whole)], None).unwrap();
            let weights = Weights::open(folder.path()).unwrap();
            let whole = weights.tensor("x", &[12, 10], DType::F32, &Device::Cpu).unwrap();
            for (dim, ranges) in cases {
                let expected: Vec<_> = ranges
                    .iter()
                    .map(|it| whole.narrow(dim, it.start, it.len()).unwrap())
                    .collect();
                let expected = Tensor::cat(&expected, dim).unwrap().to_vec2::<f32>().unwrap();
                for dtype in floats {
                    let part = weights.part("x", [12, 10], (dim, ranges), dtype).unwrap();
                    assert_eq!(part.dtype(), dtype);
                    let part = part.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
                    assert_eq!(part, expected, "{stored:?} {dim} {ranges:?}");
                }
                let outside = weights.part("x", [12, 10], (dim, &[8..13]), DType::F32);
                assert!(outside.unwrap_err().to_string().contains("8..13"));
            }
        }
        values[5 * 10 + 3] = f32::NAN;
        let whole = named("x", &values, DType::BF16).1.reshape((12, 10)).unwrap();
        let flat = named("flat", &[1.0, 2.0, 3.0, 4.0, 5.0], DType::F32);
        let bad = named("bad", &[1.0, f32::INFINITY], DType::F32);
        write_safetensors(&path, &[("x".to_string(), whole), flat, bad], None).unwrap();
        let weights = Weights::open(folder.path()).unwrap();
        let part = |dim, range| weights.part("x", [12, 10], (dim, &[range]), DType::BF16);
        for (dim, range) in [(0, 4..6), (1, 3..5)] {
            let message = part(dim, range).unwrap_err().to_string();
            assert!(message.contains("NaN at flat index 53"), "{message}");
        }
        let elements = |ranges: &[Range<usize>]| weights.elements("flat", 5, ranges, DType::F32);
        assert_eq!(elements(&[0..2, 4..5]).unwrap().to_vec1::<f32>().unwrap(), [1.0, 2.0, 5.0]);
        assert_eq!(elements(&[1..3]).unwrap().to_vec1::<f32>().unwrap(), [2.0, 3.0]);
        assert!(elements(&[3..6]).unwrap_err().to_string().contains("has no part [3..6]"));
        let error = weights.elements("bad", 2, &[0..1], DType::F32).unwrap_err().to_string();
        assert!(error.contains("inf at flat index 1"), "{error}");
        // Whose part it is tells.
        assert!(part(0, 0..5).is_ok() && part(1, 4..10).is_ok());
    }

    #[test]
    fn a_stack_is_taken_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let numbers: Vec<f32> = (0..24).map(|number| number as f32).collect();
        let open = |shape: &[usize], more: &[&str]| {
            let stack = Tensor::from_vec(numbers.clone(), shape, &Device::Cpu).unwrap();
            let mut tensors = HashMap::from([("stack".to_string(), stack.clone())]);
            tensors.extend(more.iter().map(|name| (name.to_string(), stack.clone())));
            candle_core::safetensors::save(&tensors, &path).unwrap();
            Weights::from_files([&path]).unwrap()
        };
        let name = |index: usize| format!("part.{index}");
        let mut weights = open(&[3, 4, 2], &[]);
        weights.unstack("stack", 3, name).unwrap();
        assert_eq!(weights.unread(), ["part.0", "part.1", "part.2"]);
        let part = weights.tensor("part.1", &[4, 2], DType::F32, &Device::Cpu).unwrap();
        assert_eq!(part.flatten_all().unwrap().to_vec1::<f32>().unwrap(), numbers[8..16]);
        assert_eq!(weights.unread(), ["part.0", "part.2"]);
        assert_eq!(weights.stored("part.2").unwrap().shape, [4, 2]);

        for (shape, more, expected) in [
            (
                &[4, 3, 2][..],
                &[][..],
                "tensor \"stack\" has shape [4, 3, 2], expected 3 in the first",
            ),
            (&[24], &[], "expected 3 in the first"),
            (&[3, 4, 2], &["part.2"], "has the weight \"part.2\", which is there once more"),
        ] {
            let error = open(shape, more).unstack("stack", 3, name).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} lacks {expected}");
        }
    }

    #[test]
    fn unaligned_data_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let header = r#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} "#;
        assert_ne!((8 + header.len()) % 4, 0);
        let path = file(folder.path(), header, 0);
        let mut bytes = fs::read(&path).unwrap();
        bytes.extend(1.5f32.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        let weights = Weights::open(folder.path()).unwrap();
        let tensor = weights.tensor("x", &[1], DType::F32, &Device::Cpu).unwrap();
        assert_eq!(tensor.to_vec1::<f32>().unwrap(), [1.5]);
    }

    #[test]
    fn a_scalar_and_an_empty_tensor_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let tensors = [
            ("scalar".to_string(), Tensor::new(2f32, &Device::Cpu).unwrap()),
            ("empty".to_string(), Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap()),
        ];
        write_safetensors(&path, &tensors, None).unwrap();
        let weights = Weights::open(folder.path()).unwrap();
        let scalar = weights.tensor("scalar", &[], DType::BF16, &Device::Cpu).unwrap();
        assert_eq!(scalar.dims(), [0usize; 0]);
        let empty = weights.tensor("empty", &[0, 3], DType::F32, &Device::Cpu).unwrap();
        assert_eq!(empty.dims(), [0, 3]);
    }

    #[test]
    fn headers_that_lie_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let refused = |header: &str, data: usize, expected: &str| {
            file(folder, header, data);
            let message = refusal(folder);
            assert!(message.contains("model.safetensors"), "{message}");
            assert!(message.contains(expected), "{message} lacks {expected:?}");
        };
        let good = r#"{"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
        file(folder, good, 24);
        assert_eq!(Weights::open(folder).unwrap().names().collect::<Vec<_>>(), ["x"]);
        refused(good, 23, "truncated");
        refused(good, 25, "accounts for");
        refused("{", 0, "malformed");
        refused("[]", 0, "malformed");
        refused(r#"{"x":{"dtype":"F32","shape":[2,3]}}"#, 24, "the key `data_offsets` is missing");
        refused(r#"{"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#, 8, "malformed");
        refused(r#"{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, 8, "12 bytes");
        refused(r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, 8, "\"x\"");
        refused(
            r#"{"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#,
            0,
            "overflows",
        );
        refused(
            r#"{"x":{"dtype":"U8","shape":[2305843009213693951],"data_offsets":[0,2305843009213693951]}}"#,
            0,
            "truncated",
        );
        refused(r#"{"x":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}"#, 1, "unknown");
        let entry = |range: &str| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":{range}}}"#);
        let (a, b, c) = (entry("[0,4]"), entry("[2,6]"), entry("[5,9]"));
        refused(&format!(r#"{{"x":{a},"y":{b}}}"#), 6, "starts at byte");
        refused(&format!(r#"{{"x":{a},"y":{c}}}"#), 9, "starts at byte");
        refused(&format!(r#"{{"x":{a},"x":{a}}}"#), 4, "comes twice");

        let path = folder.join("model.safetensors");
        for (bytes, expected) in [
            (&b""[..], "has 0 bytes"),
            (b"1234567", "has 7 bytes"),
            (&u64::MAX.to_le_bytes(), "not a safetensors file"),
            (&1000u64.to_le_bytes(), "truncated"),
        ] {
            fs::write(&path, bytes).unwrap();
            let message = refusal(folder);
            assert!(message.contains(expected), "{message} lacks {expected:?}");
        }
    }

    #[test]
    fn a_truncation_at_any_byte_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let tensors = [named("x", &[1.0, 2.0], DType::F32), named("y", &[3.0], DType::F16)];
        write_safetensors(&path, &tensors, None).unwrap();
        let bytes = fs::read(&path).unwrap();
        for length in 0..bytes.len() {
            fs::write(&path, &bytes[..length]).unwrap();
            let error = Weights::open(folder.path()).unwrap_err().to_string();
            assert!(!error.contains("is a safetensors file"), "{length} bytes: {error}");
        }
    }

    #[test]
    fn wrong_requests_name_the_tensor_and_what_was_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let byte = ("packed".to_string(), Tensor::new(&[1u8], &Device::Cpu).unwrap());
        let name = "model.layers.0.mlp.up_proj.weight";
        write_safetensors(&path, &[byte, named(name, &[1.0, 2.0], DType::F32)], None).unwrap();
        let weights = Weights::open(folder.path()).unwrap();
        let refusal = |name: &str, shape: &[usize], dtype| {
            weights.tensor(name, shape, dtype, &Device::Cpu).unwrap_err().to_string()
        };
        let message = refusal(name, &[2, 1], DType::F32);
        assert!(message.contains(name) && message.contains("[2]") && message.contains("[2, 1]"));
        let message = refusal("layers.0.mlp.up_proj.weight", &[2], DType::F32);
        assert!(message.contains("missing") && message.contains(name), "{message}");
        assert!(refusal("lm_head", &[2], DType::F32).contains("none of its 2 tensors"));
        let message = refusal("packed", &[1], DType::F32);
        assert!(message.contains("stored as U8, expected F32, F16 or BF16"), "{message}");
        assert!(refusal(name, &[2], DType::I64).contains("f32, f16 and bf16"));
        assert_eq!(weights.unread(), [name, "packed"]);
    }

    #[test]
    fn values_that_are_not_finite_are_refused_with_their_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let floats = [DType::F32, DType::F16, DType::BF16];
        for (bad, text) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-f32::INFINITY, "-inf")] {
            for stored in floats {
                let mut values = vec![1.0; CHUNK + 10];
                values[CHUNK + 3] = bad;
                values[CHUNK + 5] = bad;
                write_safetensors(&path, &[named("x", &values, stored)], None).unwrap();
                for dtype in floats {
                    let weights = Weights::open(folder.path()).unwrap();
                    let read = |weights: &Weights| {
                        weights.tensor("x", &[values.len()], dtype, &Device::Cpu)
                    };
                    let message = read(&weights).unwrap_err().to_string();
                    let expected = format!("\"x\" has {text} at flat index {}", CHUNK + 3);
                    assert!(message.contains(&expected), "{message}");
                    assert!(read(&weights.check_finite(false)).is_ok());
                }
            }
        }
        write_safetensors(&path, &[named("x", &[1.0, 1e6], DType::F32)], None).unwrap();
        let weights = Weights::open(folder.path()).unwrap();
        let message = weights.tensor("x", &[2], DType::F16, &Device::Cpu).unwrap_err().to_string();
        assert!(message.contains("1000000 at flat index 1, which does not fit"), "{message}");
        assert!(weights.tensor("x", &[2], DType::BF16, &Device::Cpu).is_ok());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_was_copied_takes_no_memory_of_the_file() {
        const SIDE: usize = 1 << 11;
        const COUNT: usize = SIDE * SIDE;
        // The system maps neighbours in pieces of up to 2 MB.
        const NEIGHBOURS: usize = 6 << 20;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SINGLE);
        let numbers = Tensor::arange(0.0, COUNT as f32, &Device::Cpu).unwrap();
        let bytes = Tensor::ones(4 * COUNT, DType::U8, &Device::Cpu).unwrap();
        let square = numbers.reshape((SIDE, SIDE)).unwrap();
        let tensors = [("line", &numbers), ("square", &square), ("bytes", &bytes)];
        let tensors = tensors.map(|(name, tensor)| (name.to_string(), tensor.clone()));
        write_safetensors(&path, &tensors, None).unwrap();
        let weights = Weights::open(folder.path()).unwrap();
        let resident = || files::resident_bytes(&path);
        for _ in 0..2 {
            let line = weights.tensor("line", &[COUNT], DType::F32, &Device::Cpu).unwrap();
            assert!(resident() < NEIGHBOURS, "{}", resident());
            assert_eq!(line.to_vec1::<f32>().unwrap(), numbers.to_vec1::<f32>().unwrap());
            let columns = [1..2, 9..10];
            let part = weights.part("square", [SIDE; 2], (1, &columns), DType::F32).unwrap();
            assert!(resident() < NEIGHBOURS, "{}", resident());
            let of_row = [3 * SIDE + 1, 3 * SIDE + 9].map(|number| number as f32);
            assert_eq!(part.to_vec2::<f32>().unwrap()[3], of_row);
            weights.elements("line", COUNT, &[5..9, 70..71], DType::F32).unwrap();
            assert!(resident() < NEIGHBOURS, "{}", resident());
            weights.bytes("bytes", 4 * COUNT, &Device::Cpu).unwrap();
            assert!(resident() < NEIGHBOURS, "{}", resident());
        }
        let stored = weights.stored("line").unwrap();
        assert_ne!(stored.bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 0);
        assert!(resident() >= stored.bytes.len(), "{}", resident());
        weights.release_all_of("li");
        assert!(resident() < NEIGHBOURS, "{}", resident());
    }

    #[test]
    fn shards_are_read_as_one_and_checked_against_the_index() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write_safetensors(at("a.safetensors"), &[named("x", &[1.0], DType::F32)], None).unwrap();
        write_safetensors(at("b.safetensors"), &[named("y", &[2.0], DType::BF16)], None).unwrap();
        let index = |map: &str| {
            fs::write(at(INDEX), format!(r#"{{"metadata":{{}},"weight_map":{map}}}"#)).unwrap();
        };
        index(r#"{"x":"a.safetensors","y":"b.safetensors"}"#);
        let weights = Weights::open(folder.path()).unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["x", "y"]);
        let y = weights.tensor("y", &[1], DType::F32, &Device::Cpu).unwrap();
        assert_eq!(y.to_vec1::<f32>().unwrap(), [2.0]);

        let refused = |map: &str, expected: &str| {
            index(map);
            let message = refusal(folder.path());
            assert!(message.contains(expected), "{message} lacks {expected:?}");
        };
        refused(r#"{"x":"a.safetensors","y":"c.safetensors"}"#, "c.safetensors; download");
        refused(r#"{"x":"a.safetensors","z":"b.safetensors"}"#, "\"z\" should be in b");
        refused(r#"{"x":"b.safetensors","y":"a.safetensors"}"#, "\"x\" should be in b");
        refused(r#"{"x":"../a.safetensors"}"#, "without folders");
        refused(r#"{"x":".."}"#, "without folders");
        refused("{}", "weight_map is empty");
        refused("3", "weight_map: expected an object, found 3");
        write_safetensors(at("b.safetensors"), &[named("x", &[2.0], DType::F32)], None).unwrap();
        refused(r#"{"x":"a.safetensors","y":"b.safetensors"}"#, "each tensor once");
    }

    #[test]
    fn a_folder_without_safetensors_is_told_what_it_has() {
        for (name, expected) in [
            ("pytorch_model.bin", "safe_serialization=True"),
            ("model-q4.gguf", "GGUF"),
            ("adapter_model.safetensors", "base model"),
            ("0000100_adapters.safetensors", "base model"),
            ("consolidated.safetensors", "found consolidated.safetensors"),
            ("notes.txt", "no weights in any format"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(name), "x").unwrap();
            let message = refusal(folder.path());
            assert!(message.contains(expected), "{message}");
        }
        assert!(matches!(Weights::open("no/such/folder"), Err(Error::Io { .. })));
    }
}
