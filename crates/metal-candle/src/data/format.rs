//! What a data file is: its format and compression, by its name and its first bytes.

use std::fs::File;
use std::io::{self, BufReader, Cursor, Read};
use std::path::Path;

use crate::{Error, Result, files};

/// How the records of a file are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// One JSON value a line.
    JsonLines,
    /// One JSON list of records.
    Json,
    /// A header and rows, with commas between the fields.
    Csv,
    /// A header and rows, with tabs between the fields.
    Tsv,
    /// Apache Parquet.
    Parquet,
    /// Plain text.
    Text,
}

impl Format {
    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::JsonLines => "JSON Lines",
            Self::Json => "JSON",
            Self::Csv => "CSV",
            Self::Tsv => "TSV",
            Self::Parquet => "Parquet",
            Self::Text => "text",
        }
    }
}

/// The extensions of each format; a compressed file has `.gz` or `.zst` after it.
const EXTENSIONS: &[(&str, Format)] = &[
    ("jsonl", Format::JsonLines),
    ("ndjson", Format::JsonLines),
    ("jsonlines", Format::JsonLines),
    ("json", Format::Json),
    ("csv", Format::Csv),
    ("tsv", Format::Tsv),
    ("parquet", Format::Parquet),
    ("pq", Format::Parquet),
    ("txt", Format::Text),
    ("text", Format::Text),
    ("md", Format::Text),
];

/// What is read, for messages.
pub(super) const READ: &str = "JSON Lines (.jsonl), JSON (.json), CSV (.csv), TSV (.tsv), Parquet (.parquet) and text \
                               (.txt, .md), also with .gz or .zst after it";

/// The name without what says how the file is compressed and written, and the format it names.
pub(super) fn stem_and_format(name: &str) -> (&str, Option<Format>) {
    let compressed = [".gz", ".gzip", ".zst", ".zstd"];
    let inner = compressed.iter().find_map(|end| strip_end(name, end)).unwrap_or(name);
    for (extension, format) in EXTENSIONS {
        if let Some(stem) = strip_end(inner, extension).and_then(|stem| stem.strip_suffix('.')) {
            return (stem, Some(*format));
        }
    }
    (inner, None)
}

/// `name` without `end` at its end, in capitals or not.
fn strip_end<'a>(name: &'a str, end: &str) -> Option<&'a str> {
    let at = name.len().checked_sub(end.len())?;
    name.get(at..)?.eq_ignore_ascii_case(end).then(|| name.get(..at))?
}

/// An open file of data.
pub(super) struct Input {
    pub format: Format,
    /// How the file is compressed.
    pub compression: Option<&'static str>,
    /// The content, decompressed and without a byte-order mark; of a Parquet file the file itself.
    pub content: Content,
}

pub(super) enum Content {
    Stream(BufReader<Box<dyn Read>>),
    File(File),
}

/// Bytes that are looked at to tell what a file is.
const HEAD: usize = 4096;

/// Opens a file and finds out what it is.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] when the file is a folder, or is something that is no data or that is not read.
pub(super) fn open(path: &Path) -> Result<Input> {
    let file = File::open(path).map_err(Error::io(path))?;
    if file.metadata().map_err(Error::io(path))?.is_dir() {
        return Err(Error::file(path, "is a folder; a file was expected"));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (_, named) = stem_and_format(&name);
    let (head, rest) = split_head(file).map_err(Error::io(path))?;
    if head.starts_with(b"PAR1") {
        let content = Content::File(File::open(path).map_err(Error::io(path))?);
        return Ok(Input { format: Format::Parquet, compression: None, content });
    }
    let broken = |error| Error::file(path, format!("cannot be decompressed: {error}"));
    let whole = Cursor::new(head.clone()).chain(rest);
    let (compression, head, rest): (_, _, Box<dyn Read>) = if head.starts_with(b"\x1f\x8b") {
        let (head, rest) = split_head(flate2::read::MultiGzDecoder::new(whole)).map_err(broken)?;
        (Some("gzip"), head, Box::new(rest))
    } else if head.starts_with(b"\x28\xb5\x2f\xfd") {
        let decoder = zstd::stream::read::Decoder::new(whole).map_err(broken)?;
        let (head, rest) = split_head(decoder).map_err(broken)?;
        (Some("zstd"), head, Box::new(rest))
    } else {
        (None, head, Box::new(whole.into_inner().1))
    };
    let bytes = head.strip_prefix(files::BYTE_ORDER_MARK.as_bytes()).unwrap_or(&head).to_vec();
    if let Some(what) = foreign(&bytes) {
        return Err(Error::file(path, format!("{what}; read are {READ}")));
    }
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    let format = match (named, first) {
        (Some(Format::Parquet), _) => {
            let what = if compression.is_some() { "a compressed file" } else { "not one" };
            return Err(Error::file(
                path,
                format!(
                    "is named as a Parquet file and is {what}: it doesn't begin with the letters PAR1"
                ),
            ));
        }
        (Some(Format::Json | Format::JsonLines) | None, Some(b'[')) => Format::Json,
        (Some(Format::Json | Format::JsonLines) | None, Some(b'{')) => Format::JsonLines,
        (Some(Format::Json | Format::JsonLines), Some(_)) => {
            if let Some(what) = not_json(&bytes) {
                return Err(Error::file(path, format!("is named as JSON and is {what}")));
            }
            Format::JsonLines
        }
        (None, Some(_)) => {
            return Err(Error::file(
                path,
                format!("cannot tell the format by the name or the content; read are {READ}"),
            ));
        }
        (named, None) => match named {
            None | Some(Format::Json) => Format::JsonLines,
            Some(named) => named,
        },
        (Some(named), _) => named,
    };
    let content = Content::Stream(BufReader::with_capacity(
        1 << 16,
        Box::new(Cursor::new(bytes).chain(rest)),
    ));
    Ok(Input { format, compression, content })
}

/// The first bytes of a stream, and the rest.
fn split_head<R: Read>(mut input: R) -> io::Result<(Vec<u8>, R)> {
    let mut head = Vec::with_capacity(HEAD);
    (&mut input).take(HEAD as u64).read_to_end(&mut head)?;
    Ok((head, input))
}

/// What a file is that no reader of data takes, by its first bytes.
fn foreign(head: &[u8]) -> Option<String> {
    match files::describe_binary(head) {
        Some(what) => Some(format!("is {what}")),
        None if head.contains(&0) => Some("holds NUL bytes, so it is no text".into()),
        None => None,
    }
}

/// What a file named as JSON is instead, when it begins with neither a record nor a list.
fn not_json(head: &[u8]) -> Option<String> {
    let what = files::describe_text(head)?;
    let extension = match what {
        files::TABLE_WITH_COMMAS => "; name it .csv",
        files::TABLE_WITH_TABS => "; name it .tsv",
        _ => "",
    };
    Some(format!("{what}{extension}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_the_format_past_the_compression() {
        for (name, expected) in [
            ("train.jsonl", ("train", Some(Format::JsonLines))),
            ("train.JSON", ("train", Some(Format::Json))),
            ("train-00000-of-00002.parquet", ("train-00000-of-00002", Some(Format::Parquet))),
            ("a.b.csv.gz", ("a.b", Some(Format::Csv))),
            ("a.tsv.zst", ("a", Some(Format::Tsv))),
            ("notes", ("notes", None)),
            ("xjson", ("xjson", None)),
            ("é", ("é", None)),
        ] {
            assert_eq!(stem_and_format(name), expected, "{name}");
        }
    }

    #[test]
    fn what_is_no_data_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for (name, content, expected) in [
            ("a.jsonl", &b"version https://git-lfs.github.com/spec/v1\noid"[..], "Git LFS"),
            ("a.jsonl", b"\x80\x04\x95", "a pickle of Python"),
            ("a.csv", b"PK\x03\x04abc", "a zip archive, as"),
            (
                "a.jsonl",
                b"prompt,completion\na,b\n",
                "is named as JSON and is a table in text with commas between its columns (CSV); name it .csv",
            ),
            ("a.json", b"\xef\xbb\xbfprompt\tcompletion\na\tb\n", "is a table in text with tabs"),
            ("a.jsonl", b"<!DOCTYPE html>", "is a web page"),
            ("a.jsonl", b"\xff\xfe{\0", "is text in UTF-16"),
            ("a.txt", b"a\0b", "NUL bytes"),
            ("a.parquet", b"{}", "it doesn't begin with the letters PAR1"),
            ("a.dat", b"hello", "cannot tell the format"),
            ("a.jsonl.gz", b"\x1f\x8bnothing", "cannot be decompressed"),
        ] {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            let message = open(&path).map(|_| ()).unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains(name), "{name}: {message}");
        }
        assert!(open(folder.path()).map(|_| ()).unwrap_err().to_string().contains("is a folder"));
    }
}
