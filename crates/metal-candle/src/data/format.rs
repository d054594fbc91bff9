//! What a data file is: its format and compression, by its name and its first bytes.

use std::fs::File;
use std::io::{self, BufReader, Cursor, Read};
use std::path::Path;

use crate::{Error, Result};

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
        return Ok(Input { format: Format::Parquet, content });
    }
    let broken = |error| Error::file(path, format!("cannot be decompressed: {error}"));
    let whole = Cursor::new(head.clone()).chain(rest);
    let (compressed, head, rest): (_, _, Box<dyn Read>) = if head.starts_with(b"\x1f\x8b") {
        let (head, rest) = split_head(flate2::read::MultiGzDecoder::new(whole)).map_err(broken)?;
        (true, head, Box::new(rest))
    } else if head.starts_with(b"\x28\xb5\x2f\xfd") {
        let decoder = zstd::stream::read::Decoder::new(whole).map_err(broken)?;
        let (head, rest) = split_head(decoder).map_err(broken)?;
        (true, head, Box::new(rest))
    } else {
        (false, head, Box::new(whole.into_inner().1))
    };
    if let Some(what) = foreign(&head) {
        return Err(Error::file(path, format!("{what}; read are {READ}")));
    }
    let bytes = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&head).to_vec();
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    let format = match (named, first) {
        (Some(Format::Parquet), _) => {
            let what = if compressed { "a compressed file" } else { "not one" };
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
                return Err(Error::file(path, format!("is named as JSON and {what}")));
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
    Ok(Input { format, content })
}

/// The first bytes of a stream, and the rest.
fn split_head<R: Read>(mut input: R) -> io::Result<(Vec<u8>, R)> {
    let mut head = Vec::with_capacity(HEAD);
    (&mut input).take(HEAD as u64).read_to_end(&mut head)?;
    Ok((head, input))
}

/// What a file is that no reader of data takes, by its first bytes.
fn foreign(head: &[u8]) -> Option<&'static str> {
    const SIGNATURES: &[(&[u8], &str)] = &[
        (
            b"version https://git-lfs",
            "is a pointer of Git LFS, not the data itself; `git lfs pull` fetches it",
        ),
        (b"PK\x03\x04", "is a zip archive or a workbook of Excel; unpack it, or save it as CSV"),
        (b"BZh", "is compressed by bzip2; unpack it"),
        (b"\xfd7zXZ", "is compressed by xz; unpack it"),
        (b"ARROW1", "is an Arrow file; save it as Parquet"),
        (
            b"\xff\xff\xff\xff",
            "is an Arrow stream, as `save_to_disk` writes it; save it by `to_parquet` or `to_json`",
        ),
        (b"SQLite format 3", "is a database of SQLite; export it as CSV"),
        (b"\x89HDF", "is an HDF5 file"),
        (b"\x93NUMPY", "is an array of NumPy"),
        (b"%PDF", "is a PDF"),
        (b"\xff\xfe", "is UTF-16; save it as UTF-8"),
        (b"\xfe\xff", "is UTF-16; save it as UTF-8"),
    ];
    if let Some((_, what)) = SIGNATURES.iter().find(|(signature, _)| head.starts_with(signature)) {
        return Some(what);
    }
    match head {
        [0x80, 2..=5, ..] => {
            Some("is a pickle of Python, which is never read as it can hold any program")
        }
        _ if head.contains(&0) => Some("holds NUL bytes, so it is no text"),
        _ => None,
    }
}

/// What a file named as JSON is instead, when it begins with neither a record nor a list.
fn not_json(head: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(head);
    let line = text.trim_start().lines().next().unwrap_or_default();
    if line.starts_with('<') {
        return Some("is a page of HTML or XML, perhaps an error page of a server".into());
    }
    let quoted = line.starts_with('"') && !line.contains("\",");
    if quoted {
        return None;
    }
    let separated = [(',', "CSV", ".csv"), ('\t', "TSV", ".tsv")];
    let (_, format, extension) = separated.iter().find(|(by, ..)| line.contains(*by))?;
    let columns: String = line.chars().take(80).collect();
    Some(format!("looks like {format} with the header `{columns}`; name it {extension}"))
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
            ("a.csv", b"PK\x03\x04abc", "a zip archive or a workbook"),
            (
                "a.jsonl",
                b"prompt,completion\na,b\n",
                "looks like CSV with the header `prompt,completion`; name it .csv",
            ),
            ("a.json", b"\xef\xbb\xbfprompt\tcompletion\na\tb\n", "looks like TSV"),
            ("a.jsonl", b"<!DOCTYPE html>", "a page of HTML"),
            ("a.jsonl", b"\xff\xfe{\0", "is UTF-16"),
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
