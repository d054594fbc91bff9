//! Writing a GGUF file of version 3.

use std::io::{self, Write};
use std::path::Path;

use super::container::{ALIGNMENT, Kind, MAGIC};
use super::types::GgmlType;
use crate::files;
use crate::{Error, Result};

/// The metadata of a file, in the order of their making.
#[derive(Debug, Default)]
pub(super) struct Metadata {
    entries: Vec<(String, Kind, Vec<u8>)>,
}

fn text_bytes(text: &str) -> impl Iterator<Item = u8> {
    (text.len() as u64).to_le_bytes().into_iter().chain(text.bytes())
}

impl Metadata {
    fn push(&mut self, key: &str, kind: Kind, value: impl IntoIterator<Item = u8>) {
        self.entries.push((key.to_string(), kind, value.into_iter().collect()));
    }

    fn list(
        &mut self,
        key: &str,
        kind: Kind,
        count: usize,
        elements: impl IntoIterator<Item = u8>,
    ) {
        let head = (kind as u32).to_le_bytes().into_iter().chain((count as u64).to_le_bytes());
        self.push(key, Kind::Array, head.chain(elements));
    }

    pub fn text(&mut self, key: &str, value: &str) {
        self.push(key, Kind::String, text_bytes(value));
    }

    /// A whole number, which readers expect in 32 bits.
    ///
    /// # Errors
    /// [`Error::Option`] when it is larger.
    pub fn count(&mut self, key: &str, value: usize) -> Result<()> {
        let value = u32::try_from(value).map_err(|_| {
            Error::option(key, format!("is {value}; GGUF holds up to {}", u32::MAX))
        })?;
        self.push(key, Kind::U32, value.to_le_bytes());
        Ok(())
    }

    pub fn float(&mut self, key: &str, value: f64) {
        self.push(key, Kind::F32, (value as f32).to_le_bytes());
    }

    pub fn flag(&mut self, key: &str, value: bool) {
        self.push(key, Kind::Bool, [u8::from(value)]);
    }

    pub fn texts<'a>(
        &mut self,
        key: &str,
        values: impl IntoIterator<Item = &'a str, IntoIter: ExactSizeIterator>,
    ) {
        let values = values.into_iter();
        let count = values.len();
        self.list(key, Kind::String, count, values.flat_map(text_bytes));
    }

    pub fn floats(&mut self, key: &str, values: &[f32]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        self.list(key, Kind::F32, values.len(), bytes);
    }

    pub fn whole_numbers(&mut self, key: &str, values: &[i32]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        self.list(key, Kind::I32, values.len(), bytes);
    }

    #[cfg(test)]
    pub fn flags(&mut self, key: &str, values: &[bool]) {
        self.list(key, Kind::Bool, values.len(), values.iter().map(|value| u8::from(*value)));
    }
}

/// Writes a file whole or not at all. `tensors` are names, shapes with the outermost dimension first, and types;
/// `data(index)` gives the bytes of each when its turn comes, so only one is in memory.
///
/// # Errors
/// [`Error::File`] for two tensors or keys of one name, and a tensor whose rows are no whole blocks or whose bytes have
/// another length; what `data` returns; and those of [`files::write_atomic`].
pub(super) fn write_container(
    path: &Path,
    metadata: &Metadata,
    tensors: &[(String, Vec<usize>, GgmlType)],
    mut data: impl FnMut(usize) -> Result<Vec<u8>>,
) -> Result<()> {
    let invalid = |message: String| Error::file(path, message);
    let mut header = MAGIC.to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((metadata.entries.len() as u64).to_le_bytes());
    let mut names = std::collections::BTreeSet::new();
    for (key, kind, value) in &metadata.entries {
        if !names.insert(key) {
            return Err(invalid(format!("metadata {key:?} is given twice")));
        }
        header.extend(text_bytes(key));
        header.extend((*kind as u32).to_le_bytes());
        header.extend(value);
    }
    names.clear();
    let mut sizes = Vec::with_capacity(tensors.len());
    let mut offset = 0usize;
    for (name, shape, kind) in tensors {
        if !names.insert(name) {
            return Err(invalid(format!("tensor name {name:?} is taken already")));
        }
        let Some(size) = kind.tensor_bytes(shape).filter(|_| shape.len() <= 4) else {
            return Err(invalid(format!(
                "tensor {name:?} of shape {shape:?} cannot be written as {kind}, whose blocks have {} elements",
                kind.block()
            )));
        };
        header.extend(text_bytes(name));
        header.extend((shape.len() as u32).to_le_bytes());
        for dimension in shape.iter().rev() {
            header.extend((*dimension as u64).to_le_bytes());
        }
        header.extend(kind.number().to_le_bytes());
        header.extend((offset as u64).to_le_bytes());
        sizes.push(size);
        offset += size.next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT), 0);

    let mut failure = None;
    let written = files::write_atomic(path, |writer| {
        writer.write_all(&header)?;
        for (index, size) in sizes.iter().enumerate() {
            let found = data(index).and_then(|bytes| match bytes.len() == *size {
                true => Ok(bytes),
                false => {
                    let name = tensors.get(index).map_or("", |(name, ..)| name.as_str());
                    let found = bytes.len();
                    Err(invalid(format!("tensor {name:?} has {found} bytes; expected {size}")))
                }
            });
            match found {
                Ok(bytes) => writer.write_all(&bytes)?,
                Err(error) => {
                    failure = Some(error);
                    return Err(io::Error::other("a tensor could not be made"));
                }
            }
            let padding = size.next_multiple_of(ALIGNMENT) - size;
            writer.write_all(&[0; ALIGNMENT][..padding])?;
        }
        Ok(())
    });
    match failure {
        Some(error) => Err(error),
        None => written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let tensor = |name: &str, shape: &[usize]| (name.into(), shape.to_vec(), GgmlType::F16);
        let write = |tensors: &[(String, Vec<usize>, GgmlType)], bytes: Result<Vec<u8>>| {
            let mut bytes = Some(bytes);
            write_container(&path, &Metadata::default(), tensors, |_| bytes.take().unwrap())
                .unwrap_err()
                .to_string()
        };
        let one = [tensor("a", &[2, 3])];
        assert!(write(&one, Ok(vec![0; 11])).contains("\"a\" has 11 bytes; expected 12"));
        assert!(write(&one, Err(Error::Unsupported("that".into()))).contains("that"));
        let twice = [tensor("a", &[2]), tensor("a", &[2])];
        assert!(write(&twice, Ok(vec![])).contains("taken already"));
        assert!(write(&[tensor("a", &[1; 5])], Ok(vec![])).contains("cannot be written as F16"));
        let mut metadata = Metadata::default();
        metadata.flag("k", true);
        metadata.flag("k", true);
        let error = write_container(&path, &metadata, &[], |_| Ok(vec![])).unwrap_err();
        assert!(error.to_string().contains("\"k\" is given twice"));
        assert!(metadata.count("n", usize::MAX).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
