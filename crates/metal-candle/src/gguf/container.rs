//! What is in a GGUF file: metadata, and where its tensors lie.
//!
//! The format ([specification](https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3) is
//! `"GGUF"`, a version, the numbers of tensors and of metadata, the metadata, the tensors' names, shapes,
//! types and offsets, and, from the next multiple of the alignment on, the tensors, each beginning at such
//! a multiple. The file is mapped; strings and lists stay where they are, so opening costs memory for
//! the number of entries alone. Every count, length, offset, rank and depth is checked against
//! the file before anything is made of it. `candle_core::quantized::gguf_file` takes 32 bytes and an
//! allocation for each element of a list, the last of two entries of one name, and stops at
//! types it doesn't compute with; so it isn't used here.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::types::GgmlType;
use crate::files::{self, cut};
use crate::{Error, Result};

pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// Where `general.alignment` is missing.
pub(super) const ALIGNMENT: usize = 32;
const ALIGNMENT_KEY: &str = "general.alignment";
/// More metadata or tensors than these are a mistake or an attack.
const MOST_ENTRIES: u64 = 1 << 16;
const LONGEST_KEY: usize = 1 << 16;
/// How deep lists in lists may be nested.
const DEEPEST: usize = 4;
/// Into how many files a model is split.
const SPLIT_COUNT: &str = "split.count";
const MOST_PARTS: usize = 1000;
/// ggml has tensors of up to this rank.
const MOST_DIMENSIONS: usize = 4;

/// The type of a value in the metadata, by its number in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl Kind {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == number)
    }

    /// The bytes of a value; `None` for those with a length of their own.
    fn bytes(self) -> Option<usize> {
        Some(match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
            Self::String | Self::Array => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::U8 | Self::I8 | Self::U16 | Self::I16 => "a small whole number",
            Self::U32 | Self::I32 | Self::U64 | Self::I64 => "a whole number",
            Self::F32 | Self::F64 => "a number",
            Self::Bool => "true or false",
            Self::String => "a text",
            Self::Array => "a list",
        }
    }
}

/// A value of the metadata: where it lies in the file.
#[derive(Clone, Copy, Debug)]
struct Value {
    kind: Kind,
    /// Of the value, of the text without its length, or of a list's elements.
    start: usize,
    end: usize,
    /// Of a list.
    elements: Option<(Kind, usize)>,
}

/// A tensor: its type, shape and place.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorInfo {
    pub kind: GgmlType,
    /// The outermost dimension first, the other way round than in the file.
    pub shape: Vec<usize>,
    part: usize,
    start: usize,
    end: usize,
}

/// A GGUF file, or the parts of one, of which the first has the metadata. It must not be changed or shortened while this exists: it is mapped, not read.
pub(super) struct Container {
    path: PathBuf,
    maps: Vec<(PathBuf, Mmap)>,
    values: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl fmt::Debug for Container {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Container")
            .field("path", &self.path)
            .field("values", &self.values.len())
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

/// Reads from the beginning of a file, never beyond its end.
struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn truncated(&self, what: &str, wanted: u64) -> Error {
        let left = self.bytes.len() - self.at;
        Error::file(
            self.path,
            format!(
                "{what} takes {wanted} bytes from byte {} on, but {left} follow; the file is truncated or \
                 damaged. Download it again",
                self.at
            ),
        )
    }

    /// `length` bytes; gives where they begin.
    fn skip(&mut self, what: &str, length: u64) -> Result<usize> {
        let left = (self.bytes.len() - self.at) as u64;
        if length > left {
            return Err(self.truncated(what, length));
        }
        let start = self.at;
        self.at += length as usize;
        Ok(start)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let found = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk::<N>()).copied();
        let found = found.ok_or_else(|| self.truncated(what, N as u64))?;
        self.at += N;
        Ok(found)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A text with its length before it; gives where it lies.
    fn text(&mut self, what: &str) -> Result<(usize, usize)> {
        let length = self.u64(what)?;
        let start = self.skip(what, length)?;
        Ok((start, self.at))
    }

    /// The name of an entry.
    fn key(&mut self, what: &str) -> Result<&'a str> {
        let (start, end) = self.text(what)?;
        let bytes = self.bytes.get(start..end).unwrap_or_default();
        if bytes.len() > LONGEST_KEY {
            let message =
                format!("{what} has {} bytes; at most {LONGEST_KEY} are allowed", bytes.len());
            return Err(Error::file(self.path, message));
        }
        std::str::from_utf8(bytes)
            .map_err(|_| Error::file(self.path, format!("{what} at byte {start} is no UTF-8")))
    }

    fn kind(&mut self, key: &str) -> Result<Kind> {
        let number = self.u32(key)?;
        Kind::from_number(number).ok_or_else(|| {
            let message = format!(
                "{}: its type is {number}; expected 0 to 12, the types that GGUF has",
                cut(key)
            );
            Error::file(self.path, message)
        })
    }

    /// A value of the metadata, which is walked to its end.
    fn value(&mut self, key: &str, kind: Kind, depth: usize) -> Result<Value> {
        match kind {
            Kind::String => {
                let (start, end) = self.text(key)?;
                Ok(Value { kind, start, end, elements: None })
            }
            Kind::Array => {
                if depth == DEEPEST {
                    let message =
                        format!("{}: lists are nested more than {DEEPEST} deep", cut(key));
                    return Err(Error::file(self.path, message));
                }
                let element = self.kind(key)?;
                let count = self.u64(key)?;
                let start = self.at;
                match element.bytes() {
                    Some(bytes) => {
                        let length = count.saturating_mul(bytes as u64);
                        self.skip(key, length)?;
                    }
                    // Every element has at least its length, so this ends with the file.
                    None => {
                        let least = count.saturating_mul(8);
                        if least > (self.bytes.len() - self.at) as u64 {
                            return Err(self.truncated(key, least));
                        }
                        for _ in 0..count {
                            self.value(key, element, depth + 1)?;
                        }
                    }
                }
                let elements = Some((element, count as usize));
                Ok(Value { kind, start, end: self.at, elements })
            }
            Kind::Bool => {
                let start = self.at;
                match self.array::<1>(key)? {
                    [0 | 1] => Ok(Value { kind, start, end: self.at, elements: None }),
                    [other] => {
                        let message = format!(
                            "{}: expected 0 or 1 for false or true, found {other}",
                            cut(key)
                        );
                        Err(Error::file(self.path, message))
                    }
                }
            }
            _ => {
                let start = self.skip(key, kind.bytes().unwrap_or(0) as u64)?;
                Ok(Value { kind, start, end: self.at, elements: None })
            }
        }
    }
}

impl Container {
    /// Maps a file and reads what is in it.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be read; [`Error::File`] when it is no GGUF file of version 2 or 3, or claims
    /// what its own length or the format contradicts; [`Error::Unsupported`] for version 1 and for big-endian files.
    pub fn open(path: &Path) -> Result<Self> {
        let mut file = Self::open_one(path)?;
        let count = file.count(SPLIT_COUNT)?.unwrap_or(1);
        if count <= 1 {
            return Ok(file);
        }
        let names = part_names(path, count);
        let names = names.ok_or_else(|| {
            file.invalid(
                SPLIT_COUNT,
                format!(
                    "is {count}; of a model in up to {MOST_PARTS} files, the first is expected, whose name ends with \
                     -00001-of-{count:05}.gguf"
                ),
            )
        })?;
        let total = file.count("split.tensors.count")?;
        for (number, name) in names.iter().enumerate().skip(1) {
            let mut part = Self::open_one(name)?;
            let (found, of) = (part.count("split.no")?, part.count(SPLIT_COUNT)?);
            if (found, of) != (Some(number), Some(count)) {
                let words =
                    |number: Option<usize>| number.map_or("none".into(), |it| it.to_string());
                return Err(part.invalid(
                    "split.no",
                    format!(
                        "is {} of {}; expected {number} of {count}, by its name",
                        words(found),
                        words(of)
                    ),
                ));
            }
            for (tensor, mut info) in std::mem::take(&mut part.tensors) {
                info.part = number;
                if file.tensors.contains_key(&tensor) {
                    let message = format!("tensor {:?} is also in another part", cut(&tensor));
                    return Err(Error::file(name, message));
                }
                file.tensors.insert(tensor, info);
            }
            file.maps.append(&mut part.maps);
        }
        match total {
            Some(total) if total != file.tensors.len() => {
                let found = file.tensors.len();
                let message = format!("is {total}, but the parts have {found} tensors");
                Err(file.invalid("split.tensors.count", message))
            }
            _ => Ok(file),
        }
    }

    fn open_one(path: &Path) -> Result<Self> {
        let (file, metadata) = files::open_regular(path)?;
        if metadata.len() < 24 {
            let found = metadata.len();
            let message =
                format!("has {found} bytes; a GGUF file has at least 24. Download it again");
            return Err(Error::file(path, message));
        }
        // SAFETY: a mapping is only unsound to read when the file changes meanwhile. Like
        // every program that maps checkpoints, this one asks its user not to do that.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        let (values, tensors) = parse(path, &map)?;
        let path = path.to_path_buf();
        Ok(Self { path: path.clone(), maps: vec![(path, map)], values, tensors })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All files, this one first.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.maps.iter().map(|(path, _)| path.as_path())
    }

    /// An error about a key.
    pub fn invalid(&self, key: &str, message: impl AsRef<str>) -> Error {
        Error::file(&self.path, format!("{}: {}", cut(key), message.as_ref()))
    }

    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    fn bytes_of(&self, value: &Value) -> &[u8] {
        self.maps.first().and_then(|(_, map)| map.get(value.start..value.end)).unwrap_or_default()
    }

    fn number(&self, value: &Value) -> Option<Number> {
        number(value.kind, self.bytes_of(value))
    }

    fn unexpected(&self, key: &str, expected: &str, value: &Value) -> Error {
        let found = match self.number(value) {
            Some(number) => number.to_string(),
            None => value.kind.name().to_string(),
        };
        self.invalid(key, format!("expected {expected}, found {found}"))
    }

    fn utf8(&self, key: &str, bytes: &'_ [u8]) -> Result<()> {
        std::str::from_utf8(bytes).map(drop).map_err(|error| {
            let byte = error.valid_up_to();
            self.invalid(key, format!("is no text in UTF-8: byte {byte} is none of a character"))
        })
    }

    /// The text under a key.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        if value.kind != Kind::String {
            return Err(self.unexpected(key, "a text", value));
        }
        let bytes = self.bytes_of(value);
        self.utf8(key, bytes)?;
        Ok(std::str::from_utf8(bytes).ok())
    }

    /// A whole number from 0, of any of the integer types.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match self.number(value) {
            Some(Number::Whole(number)) => usize::try_from(number).ok(),
            _ => None,
        }
        .map(Some)
        .ok_or_else(|| self.unexpected(key, "a whole number from 0", value))
    }

    /// A number, of any of the number types. One of 32 bits gives the shortest decimal number that means it,
    /// so `1e-5` is not `9.999999747378752e-6`.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match self.number(value) {
            Some(Number::Real(number)) if number.is_finite() => Some(number),
            Some(Number::Whole(number)) => Some(number as f64),
            _ => None,
        }
        .map(Some)
        .ok_or_else(|| self.unexpected(key, "a number", value))
    }

    /// Whether a key says true.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match (value.kind, self.bytes_of(value)) {
            (Kind::Bool, [flag]) => Ok(Some(*flag != 0)),
            _ => Err(self.unexpected(key, "true or false", value)),
        }
    }

    /// The kind and the number of a list's elements.
    fn list(&self, key: &str) -> Result<Option<(&Value, Kind, usize)>> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match value.elements {
            Some((kind, count)) => Ok(Some((value, kind, count))),
            None => Err(self.unexpected(key, "a list", value)),
        }
    }

    /// A list of texts.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let Some((value, kind, count)) = self.list(key)? else { return Ok(None) };
        if count > 0 && kind != Kind::String {
            return Err(self
                .invalid(key, format!("expected a list of texts, found one of {}", kind.name())));
        }
        let mut rest = self.bytes_of(value);
        let mut texts = Vec::with_capacity(count);
        while let Some((length, after)) = rest.split_first_chunk::<8>() {
            let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
            // All of it was walked when the file was opened.
            let Some((text, after)) = after.split_at_checked(length) else { break };
            let text = std::str::from_utf8(text).map_err(|_| {
                self.invalid(key, format!("its text number {} is no UTF-8", texts.len()))
            })?;
            texts.push(text);
            rest = after;
        }
        Ok(Some(texts))
    }

    /// A list of numbers.
    fn numbers(&self, key: &str) -> Result<Option<Vec<Number>>> {
        let Some((value, kind, _)) = self.list(key)? else { return Ok(None) };
        let Some(bytes) = kind.bytes() else {
            let message = format!("expected a list of numbers, found one of {}", kind.name());
            return Err(self.invalid(key, message));
        };
        let elements = self.bytes_of(value).chunks_exact(bytes);
        Ok(Some(elements.filter_map(|element| number(kind, element)).collect()))
    }

    /// A list of numbers as f32.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>> {
        let numbers = self.numbers(key)?;
        let as_f32 = |number: Number| match number {
            Number::Real(number) => number as f32,
            Number::Whole(number) => number as f32,
        };
        Ok(numbers.map(|numbers| numbers.into_iter().map(as_f32).collect()))
    }

    /// A list of whole numbers, or of true and false as 1 and 0.
    pub fn whole_numbers(&self, key: &str) -> Result<Option<Vec<i128>>> {
        let Some(numbers) = self.numbers(key)? else { return Ok(None) };
        let whole = |number: Number| match number {
            Number::Whole(number) => Ok(number),
            Number::Real(number) => {
                Err(self.invalid(key, format!("expected whole numbers, found {number}")))
            }
        };
        numbers.into_iter().map(whole).collect::<Result<_>>().map(Some)
    }

    pub fn is_list(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(|value| value.kind == Kind::Array)
    }

    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// A tensor's bytes.
    pub fn data(&self, info: &TensorInfo) -> &[u8] {
        // Its range was checked when the file was opened.
        self.maps
            .get(info.part)
            .and_then(|(_, map)| map.get(info.start..info.end))
            .unwrap_or_default()
    }

    /// Gives back the memory of the file's bytes that a tensor takes, when they were copied.
    pub fn release(&self, info: &TensorInfo) {
        if let Some((_, map)) = self.maps.get(info.part) {
            files::release(map, info.start..info.end);
        }
    }
}

/// The files of a model in several, of which `path` is the first: `<name>-00001-of-00003.gguf`.
fn part_names(path: &Path, count: usize) -> Option<Vec<PathBuf>> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-00001-of-{count:05}.gguf"))?;
    let part =
        |number: usize| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf"));
    (count <= MOST_PARTS).then(|| (1..=count).map(part).collect())
}

/// A number of any type.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Number {
    Whole(i128),
    Real(f64),
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Whole(number) => number.fmt(f),
            Self::Real(number) => number.fmt(f),
        }
    }
}

fn number(kind: Kind, bytes: &[u8]) -> Option<Number> {
    fn of<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
        bytes.try_into().ok()
    }
    Some(match kind {
        Kind::U8 => Number::Whole(u8::from_le_bytes(of(bytes)?).into()),
        Kind::I8 => Number::Whole(i8::from_le_bytes(of(bytes)?).into()),
        Kind::U16 => Number::Whole(u16::from_le_bytes(of(bytes)?).into()),
        Kind::I16 => Number::Whole(i16::from_le_bytes(of(bytes)?).into()),
        Kind::U32 => Number::Whole(u32::from_le_bytes(of(bytes)?).into()),
        Kind::I32 => Number::Whole(i32::from_le_bytes(of(bytes)?).into()),
        Kind::U64 => Number::Whole(u64::from_le_bytes(of(bytes)?).into()),
        Kind::I64 => Number::Whole(i64::from_le_bytes(of(bytes)?).into()),
        Kind::F32 => Number::Real(shortest(f32::from_le_bytes(of(bytes)?))),
        Kind::F64 => Number::Real(f64::from_le_bytes(of(bytes)?)),
        Kind::Bool => Number::Whole(u8::from_le_bytes(of(bytes)?).into()),
        Kind::String | Kind::Array => return None,
    })
}

/// The f64 whose decimal number is the shortest that means `number`.
pub(super) fn shortest(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

type Content = (BTreeMap<String, Value>, BTreeMap<String, TensorInfo>);

fn parse(path: &Path, bytes: &[u8]) -> Result<Content> {
    let invalid = |message: String| Error::file(path, message);
    let mut cursor = Cursor { path, bytes, at: 0 };
    if cursor.array::<4>("the magic number")? != *MAGIC {
        let what = files::describe_content(bytes);
        let what = what.map_or("begins with other bytes".into(), |what| format!("is {what}"));
        return Err(invalid(format!("{what}; a GGUF file begins with \"GGUF\"")));
    }
    match cursor.u32("the version")? {
        2 | 3 => {}
        1 => {
            return Err(Error::Unsupported(format!(
                "{}: is of version 1 of GGUF; versions 2 and 3 can be read. Convert the model again",
                path.display()
            )));
        }
        // Of a file in the other byte order.
        version if matches!(version.swap_bytes(), 1..=3) => {
            return Err(Error::Unsupported(format!(
                "{}: is a big-endian GGUF file; little-endian ones can be read",
                path.display()
            )));
        }
        other => {
            return Err(invalid(format!("is of version {other} of GGUF; expected 2 or 3")));
        }
    }
    let tensor_count = cursor.u64("the number of tensors")?;
    let value_count = cursor.u64("the number of metadata entries")?;
    for (count, what) in [(tensor_count, "tensors"), (value_count, "metadata entries")] {
        if count > MOST_ENTRIES {
            return Err(invalid(format!(
                "claims {count} {what}; at most {MOST_ENTRIES} are allowed"
            )));
        }
    }

    let mut values = BTreeMap::new();
    for _ in 0..value_count {
        let key = cursor.key("a key of the metadata")?;
        let kind = cursor.kind(key)?;
        let value = cursor.value(key, kind, 0)?;
        if values.insert(key.to_string(), value).is_some() {
            return Err(invalid(format!("{}: comes twice in the metadata", cut(key))));
        }
    }
    let alignment = match values.get(ALIGNMENT_KEY) {
        None => ALIGNMENT,
        Some(value) => {
            let found = bytes.get(value.start..value.end).and_then(|it| number(value.kind, it));
            match found {
                Some(Number::Whole(number @ 1..=0x10_0000)) if number & (number - 1) == 0 => {
                    number as usize
                }
                _ => {
                    return Err(invalid(format!(
                        "{ALIGNMENT_KEY}: expected a power of two up to {}",
                        0x10_0000
                    )));
                }
            }
        }
    };

    let mut found = Vec::new();
    for _ in 0..tensor_count {
        found.push(tensor(&mut cursor)?);
    }
    let data = cursor.at.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
    place(path, bytes.len(), data, alignment, found).map(|tensors| (values, tensors))
}

/// A tensor's description: name, shape, type, and offset in the data.
fn tensor(cursor: &mut Cursor) -> Result<(String, TensorInfo, u64)> {
    let name = cursor.key("a tensor's name")?;
    let path = cursor.path;
    let invalid = |message: String| Error::file(path, format!("tensor {:?}: {message}", cut(name)));
    let rank = cursor.u32(name)?;
    if rank == 0 || rank as usize > MOST_DIMENSIONS {
        return Err(invalid(format!("has {rank} dimensions; expected 1 to {MOST_DIMENSIONS}")));
    }
    let mut shape = Vec::with_capacity(MOST_DIMENSIONS);
    for _ in 0..rank {
        let dimension = cursor.u64(name)?;
        // ggml counts in signed numbers.
        let dimension = i64::try_from(dimension).ok().and_then(|size| usize::try_from(size).ok());
        shape.push(dimension.ok_or_else(|| invalid("a dimension is too large".into()))?);
    }
    shape.reverse();
    let number = cursor.u32(name)?;
    let kind = GgmlType::from_number(number)
        .ok_or_else(|| invalid(format!("has type {number}, which is unknown")))?;
    let Some(size) = kind.tensor_bytes(&shape) else {
        return Err(invalid(format!(
            "shape {shape:?} of {kind} is too large or its rows are no whole blocks of {} elements",
            kind.block()
        )));
    };
    let offset = cursor.u64(name)?;
    Ok((name.to_string(), TensorInfo { kind, shape, part: 0, start: 0, end: size }, offset))
}

/// Checks where tensors lie, and gives them their places. The format allows neither overlaps nor gaps but those of the
/// alignment: both hide a wrong header.
fn place(
    path: &Path,
    length: usize,
    data: usize,
    alignment: usize,
    mut found: Vec<(String, TensorInfo, u64)>,
) -> Result<BTreeMap<String, TensorInfo>> {
    found.sort_by_key(|(_, info, offset)| (*offset, info.end));
    let mut tensors = BTreeMap::new();
    let mut expected = 0usize;
    for (name, mut info, offset) in found {
        let invalid =
            |message: String| Error::file(path, format!("tensor {:?}: {message}", cut(&name)));
        if offset != expected as u64 {
            return Err(invalid(format!(
                "starts at byte {offset} of the data; expected {expected}, where the one before ends"
            )));
        }
        let size = info.end;
        info.start = data.saturating_add(expected);
        info.end = info.start.saturating_add(size);
        if info.end > length {
            return Err(invalid(format!(
                "ends at byte {} of the file, which has {length}; it is truncated. Download it again",
                info.end
            )));
        }
        // Both are at most the file's length.
        expected = (expected + size).next_multiple_of(alignment);
        if tensors.contains_key(&name) {
            return Err(invalid("comes twice".into()));
        }
        tensors.insert(name, info);
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::super::writer::{Metadata, write_container};
    use super::*;

    /// A file with each kind of value, two tensors, and what was written.
    fn file() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let mut metadata = Metadata::default();
        metadata.text("general.architecture", "llama");
        metadata.count("a.count", 7).unwrap();
        metadata.float("a.float", 1e-5);
        metadata.flag("a.flag", true);
        metadata.texts("a.texts", ["x", "", "ä b"]);
        metadata.floats("a.floats", &[0.5, -1.0]);
        metadata.whole_numbers("a.whole", &[3, -4]);
        metadata.flags("a.flags", &[true, false]);
        let tensors = [
            ("one".to_string(), vec![2, 3], GgmlType::F32),
            ("two".to_string(), vec![2, 32], GgmlType::from_name("Q8_0").unwrap()),
        ];
        write_container(&path, &metadata, &tensors, |index| {
            Ok(match index {
                0 => (0..24).collect(),
                _ => vec![7; 68],
            })
        })
        .unwrap();
        (folder, path)
    }

    #[test]
    fn what_is_written_is_read() {
        let (_folder, path) = file();
        let found = Container::open(&path).unwrap();
        assert_eq!(found.text("general.architecture").unwrap(), Some("llama"));
        assert_eq!(found.count("a.count").unwrap(), Some(7));
        assert_eq!(found.float("a.float").unwrap(), Some(1e-5));
        assert_eq!(found.float("a.count").unwrap(), Some(7.0));
        assert_eq!(found.flag("a.flag").unwrap(), Some(true));
        assert_eq!(found.texts("a.texts").unwrap().unwrap(), ["x", "", "ä b"]);
        assert_eq!(found.floats("a.floats").unwrap().unwrap(), [0.5, -1.0]);
        assert_eq!(found.whole_numbers("a.whole").unwrap().unwrap(), [3, -4]);
        assert_eq!(found.whole_numbers("a.flags").unwrap().unwrap(), [1, 0]);
        assert_eq!(found.text("nothing").unwrap(), None);
        let one = found.tensor("one").unwrap();
        assert_eq!((one.shape.as_slice(), one.kind), (&[2, 3][..], GgmlType::F32));
        assert_eq!(found.data(one), (0..24).collect::<Vec<u8>>());
        assert_eq!(found.data(found.tensor("two").unwrap()), [7; 68]);
        for (key, error) in [
            (found.count("a.float").unwrap_err(), "a.float: expected a whole number from 0"),
            (found.text("a.count").unwrap_err(), "a.count: expected a text, found 7"),
            (found.flag("a.count").unwrap_err(), "a.count: expected true or false, found 7"),
            (found.texts("a.floats").unwrap_err(), "a.floats: expected a list of texts"),
            (found.floats("a.count").unwrap_err(), "a.count: expected a list"),
            (found.whole_numbers("a.floats").unwrap_err(), "expected whole numbers, found 0.5"),
        ] {
            assert!(key.to_string().contains(error), "{key}");
            assert!(key.to_string().contains("a.gguf"), "{key}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_was_copied_takes_no_memory_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let tensors = [("large".to_string(), vec![4 << 20], GgmlType::F32)];
        write_container(&path, &Metadata::default(), &tensors, |_| Ok(vec![7; 16 << 20])).unwrap();
        let found = Container::open(&path).unwrap();
        let info = found.tensor("large").unwrap();
        for _ in 0..2 {
            assert!(found.data(info).iter().all(|byte| *byte == 7));
            assert!(files::resident_bytes(&path) >= 16 << 20);
            found.release(info);
            assert!(files::resident_bytes(&path) < 6 << 20);
        }
    }

    #[test]
    fn the_parts_of_a_model_are_read_together() {
        let folder = tempfile::tempdir().unwrap();
        let write = |number: usize, (no, count): (usize, usize), name: &str, total: usize| {
            let path = folder.path().join(format!("a-{number:05}-of-00002.gguf"));
            let mut metadata = Metadata::default();
            metadata.count("split.no", no).unwrap();
            metadata.count("split.count", count).unwrap();
            metadata.count("split.tensors.count", total).unwrap();
            let tensors = [(name.to_string(), vec![2], GgmlType::F32)];
            write_container(&path, &metadata, &tensors, |_| Ok(vec![number as u8; 8])).unwrap();
            path
        };
        let refused = |path: &Path| Container::open(path).unwrap_err().to_string();
        let first = write(1, (0, 2), "t", 2);
        assert!(matches!(Container::open(&first), Err(Error::Io { .. })), "the second is missing");
        let second = write(2, (1, 2), "u", 2);
        let found = Container::open(&first).unwrap();
        let data = |name: &str| found.data(found.tensor(name).unwrap()).to_vec();
        assert_eq!((data("t"), data("u")), (vec![1; 8], vec![2; 8]));
        assert!(refused(&second).contains("the first is expected"), "{}", refused(&second));
        write(2, (1, 2), "t", 2);
        assert!(refused(&first).contains("\"t\" is also in another part"));
        write(2, (0, 2), "u", 2);
        assert!(refused(&first).contains("is 0 of 2; expected 1 of 2"));
        write(2, (1, 2), "u", 2);
        write(1, (0, 2), "t", 3);
        assert!(refused(&first).contains("is 3, but the parts have 2 tensors"));
        write(1, (0, 5000), "t", 2);
        assert!(refused(&first).contains("is 5000"));
    }

    /// What is said of a file with these bytes.
    fn refused(bytes: &[u8]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("b.gguf");
        std::fs::write(&path, bytes).unwrap();
        Container::open(&path).unwrap_err().to_string()
    }

    fn header(tensors: u64, values: u64, rest: &[u8]) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(values.to_le_bytes());
        bytes.extend(rest);
        bytes
    }

    fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
        let mut bytes = (key.len() as u64).to_le_bytes().to_vec();
        bytes.extend(key.as_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
        bytes
    }

    fn list(kind: u32, count: u64, rest: &[u8]) -> Vec<u8> {
        [&kind.to_le_bytes()[..], &count.to_le_bytes(), rest].concat()
    }

    fn info(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
        let mut bytes = entry(name, dims.len() as u32, &[]);
        dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes
    }

    #[test]
    fn what_a_file_claims_is_checked_before_it_is_used() {
        let huge = u64::MAX;
        let nested = |depth: usize| {
            let mut value = list(0, 0, &[]);
            (0..depth).for_each(|_| value = list(9, 1, &value));
            entry("k", 9, &value)
        };
        let two = [info("t", &[8], 0, 0), info("t", &[8], 0, 32), vec![0; 200]].concat();
        let gap = [info("t", &[8], 0, 0), info("u", &[8], 0, 64), vec![0; 200]].concat();
        let overlap = [info("t", &[8], 0, 0), info("u", &[8], 0, 0), vec![0; 200]].concat();
        let twice = [entry("k", 0, &[1]), entry("k", 0, &[1])].concat();
        let alignment = entry("general.alignment", 4, &3u32.to_le_bytes());
        let cases: Vec<(Vec<u8>, &str)> = vec![
            (b"GGUF".to_vec(), "has 4 bytes; a GGUF file has at least 24"),
            (vec![b'{'; 30], "a GGUF file begins with \"GGUF\""),
            ([&b"GGUF\x01\0\0\0"[..], &[0; 30]].concat(), "version 1 of GGUF"),
            ([&b"GGUF\0\0\0\x03"[..], &[0; 30]].concat(), "big-endian"),
            ([&b"GGUF\x07\0\0\0"[..], &[0; 30]].concat(), "version 7"),
            (header(huge, 0, &[]), "claims 18446744073709551615 tensors"),
            (header(0, 1 << 20, &[]), "claims 1048576 metadata entries"),
            (header(0, 3, &[]), "a key of the metadata takes 8 bytes"),
            (header(0, 1, &huge.to_le_bytes()), "takes 18446744073709551615 bytes"),
            (header(0, 1, &entry("k", 13, &[])), "k: its type is 13"),
            (header(0, 1, &entry("k", 7, &[2])), "k: expected 0 or 1"),
            (header(0, 1, &entry("k", 8, &huge.to_le_bytes())), "k takes 18446744073709551615"),
            (header(0, 1, &entry("k", 9, &list(10, huge, &[]))), "k takes 18446744073709551615"),
            (header(0, 1, &entry("k", 9, &list(8, 1 << 60, &[]))), "k takes 9223372036854775808"),
            (header(0, 1, &entry("k", 9, &list(9, 1 << 61, &[]))), "k takes 18446744073709551615"),
            (header(0, 1, &nested(5)), "nested more than 4 deep"),
            (header(0, 2, &twice), "k: comes twice"),
            (header(0, 1, &alignment), "general.alignment: expected a power of two"),
            (header(1, 0, &info("t", &[], 0, 0)), "\"t\": has 0 dimensions"),
            (header(1, 0, &info("t", &[1; 5], 0, 0)), "\"t\": has 5 dimensions"),
            (header(1, 0, &info("t", &[huge], 0, 0)), "a dimension is too large"),
            (header(1, 0, &info("t", &[1 << 40, 1 << 40], 0, 0)), "is too large"),
            (header(1, 0, &info("t", &[33, 2], 8, 0)), "no whole blocks of 32"),
            (header(1, 0, &info("t", &[8], 5, 0)), "has type 5, which is unknown"),
            (header(1, 0, &info("t", &[8], 0, 8)), "starts at byte 8 of the data; expected 0"),
            (header(1, 0, &info("t", &[8], 0, 0)), "it is truncated"),
            (header(2, 0, &two), "\"t\": comes twice"),
            (header(2, 0, &gap), "starts at byte 64 of the data; expected 32"),
            (header(2, 0, &overlap), "starts at byte 0 of the data; expected 32"),
        ];
        for (bytes, expected) in cases {
            let error = refused(&bytes);
            assert!(error.contains(expected), "{error} lacks {expected}");
        }
    }

    #[test]
    fn texts_that_are_none_are_refused_when_they_are_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("b.gguf");
        let text = [&2u64.to_le_bytes()[..], b"a\xff"].concat();
        let values =
            [entry("k", 8, &text), entry("l", 9, &list(8, 1, &text)), nested_lists()].concat();
        std::fs::write(&path, header(0, 3, &values)).unwrap();
        let found = Container::open(&path).unwrap();
        assert!(found.text("k").unwrap_err().to_string().contains("byte 1"));
        assert!(found.texts("l").unwrap_err().to_string().contains("text number 0"));
        assert!(found.texts("m").unwrap_err().to_string().contains("expected a list of texts"));
        assert!(found.floats("m").unwrap_err().to_string().contains("expected a list of numbers"));
    }

    fn nested_lists() -> Vec<u8> {
        entry("m", 9, &list(9, 2, &[list(0, 2, &[1, 2]), list(0, 0, &[])].concat()))
    }
}
