//! What a file really is, for errors about one that isn't what its name says.

/// What [`describe_content`] says of a table whose fields have commas between.
pub(crate) const TABLE_WITH_COMMAS: &str = "a table in text with commas between its columns (CSV)";
/// What [`describe_content`] says of a table whose fields have tabs between.
pub(crate) const TABLE_WITH_TABS: &str = "a table in text with tabs between its columns (TSV)";
/// What [`describe_content`] says of weights.
pub(crate) const SAFETENSORS: &str = "a safetensors file";

/// What these first bytes of a file say it is, where that is something that people often have in place of a model's or
/// a data file's content; words that follow "is".
///
/// It knows a pointer of Git LFS, the hub's answer that there is no such file, a web page, byte-order marks and UTF-16,
/// pickles and PyTorch's archives, compressed files, Parquet, Arrow, GGUF, HDF5, NumPy, SQLite, PDF, safetensors,
/// tables in text, and files that are empty or hold zeros alone. `None` is anything else; JSON in UTF-8 is always
/// `None`.
pub fn describe_content(bytes: &[u8]) -> Option<&'static str> {
    if bytes.is_empty() {
        return Some("empty");
    }
    describe_binary(bytes).or_else(|| describe_text(bytes))
}

/// The part of [`describe_content`] about what is no text in UTF-8, or not the file itself.
pub(crate) fn describe_binary(bytes: &[u8]) -> Option<&'static str> {
    const MAGIC: &[(&[u8], &str)] = &[
        (
            b"version https://git-lfs.github.com/spec/",
            "a pointer of Git LFS and not the file that it stands for; `git lfs pull` fetches that",
        ),
        (
            b"\xef\xbb\xbf",
            "text that begins with a byte-order mark (BOM); save it as UTF-8 without one",
        ),
        (b"\xff\xfe", "text in UTF-16; save it as UTF-8"),
        (b"\xfe\xff", "text in UTF-16; save it as UTF-8"),
        (
            b"PK\x03\x04",
            "a zip archive, as PyTorch's .bin and .pt files and workbooks of Excel are",
        ),
        (b"\x80\x02", "a pickle of Python, as PyTorch's .bin and .pt files are"),
        (b"\x80\x03", PICKLE),
        (b"\x80\x04", PICKLE),
        (b"\x80\x05", PICKLE),
        (b"\x1f\x8b", "compressed with gzip"),
        (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
        (b"BZh", "compressed with bzip2; unpack it"),
        (b"\xfd7zXZ", "compressed with xz; unpack it"),
        (b"PAR1", "a Parquet file"),
        (b"ARROW1", "an Arrow file; save it as Parquet"),
        (b"GGUF", "a GGUF file"),
        (b"\x89HDF\r\n", "an HDF5 file"),
        (b"\x93NUMPY", "an array of NumPy"),
        (b"SQLite format 3\0", "a database of SQLite; export it as CSV"),
        (b"%PDF-", "a PDF"),
    ];
    const PICKLE: &str = "a pickle of Python, which is never read as it can hold any program";
    if let Some((_, what)) = MAGIC.iter().find(|(start, _)| bytes.starts_with(start)) {
        return Some(what);
    }
    // A mark, and the length of the first message, a positive number in four bytes.
    if let Some(length) = bytes.strip_prefix(b"\xff\xff\xff\xff")
        && length.get(3).is_none_or(|highest| *highest < 0x80)
    {
        return Some(
            "an Arrow stream, as `save_to_disk` of `datasets` writes it; save it by `to_parquet` or `to_json`",
        );
    }
    let start = bytes.get(..4096).unwrap_or(bytes);
    if !start.is_empty() && start.iter().all(|byte| *byte == 0) {
        return Some("nothing but zeros at its beginning, as downloads that broke off leave them");
    }
    // The length of a header, which is far below 2^40 bytes, and the header.
    if let Some(&[_, _, _, _, _, 0, 0, 0, b'{']) = start.first_chunk() {
        return Some(SAFETENSORS);
    }
    None
}

/// The part of [`describe_content`] about text.
pub(crate) fn describe_text(bytes: &[u8]) -> Option<&'static str> {
    let start = bytes.get(..4096).unwrap_or(bytes);
    let text = match std::str::from_utf8(start) {
        Ok(text) => text,
        // A character may have been cut at the end.
        Err(error) if start.len() - error.valid_up_to() < 4 => {
            std::str::from_utf8(start.get(..error.valid_up_to())?).ok()?
        }
        Err(_) => return None,
    };
    let text = text.trim_start();
    if text.trim_end() == "Entry not found" {
        return Some("an answer of the hub that there is no such file, saved as the file");
    }
    let tag = text.get(..15).unwrap_or(text).to_ascii_lowercase();
    if tag.starts_with("<!doctype html") || tag.starts_with("<html") {
        return Some("a web page; it was downloaded from a page about the file, or behind a login");
    }
    if tag.starts_with("<?xml") {
        return Some("XML");
    }
    // A table's first lines have as many separators; JSON begins with a bracket, or is one value on one line.
    let mut lines = text.lines();
    let (header, row) = (lines.next()?, lines.next()?);
    if header.starts_with(['{', '[', '<', '#']) {
        return None;
    }
    let count = |line: &str, separator| line.matches(separator).count();
    if count(header, '\t') > 0 && count(header, '\t') == count(row, '\t') {
        Some(TABLE_WITH_TABS)
    } else if count(header, ',') > 0 && count(row, ',') >= count(header, ',') {
        Some(TABLE_WITH_COMMAS)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::describe_content;

    #[test]
    fn files_are_known_for_what_they_are() {
        for (bytes, expected) in [
            (&b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"[..], "Git LFS"),
            (b"Entry not found", "no such file"),
            (b"\xef\xbb\xbf{}", "byte-order mark"),
            (b"\xff\xfe{\0}\0", "UTF-16"),
            (b"PK\x03\x04\0\0archive/data.pkl", "zip archive"),
            (b"BZh91AY", "bzip2"),
            (b"ARROW1\0\0", "Arrow file"),
            (b"\xff\xff\xff\xff\x10", "Arrow stream"),
            (b"\xff\xff\xff\xff\x10\x01\0\0", "Arrow stream"),
            (b"SQLite format 3\0", "SQLite"),
            (b"%PDF-1.7", "PDF"),
            (b"\x80\x02}q\0.", "pickle"),
            (b"\x80\x04\x95", "pickle"),
            (b"\x1f\x8b\x08", "gzip"),
            (b"PAR1\x15\x04", "Parquet"),
            (b"GGUF\x03\0\0\0", "GGUF"),
            (b"\x02\0\0\0\0\0\0\0{}", "safetensors"),
            (b"\n  <!DOCTYPE html>\n<html>", "web page"),
            (b"<HTML lang=en>", "web page"),
            (b"", "empty"),
            (b"\0\0\0\0\0\0\0\0\0\0", "zeros"),
            (b"prompt,completion\nWhat?,\"That, there.\"\n", "CSV"),
            (b"\"prompt\",\"completion\"\n\"What?\",\"That.\"\n", "CSV"),
            (b"prompt\tcompletion\nWhat?\tThat.\n", "TSV"),
        ] {
            let found = describe_content(bytes).unwrap_or_else(|| panic!("{bytes:?}"));
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn what_is_as_it_should_be_is_not_described() {
        for bytes in [
            &b"{\"a\": 1,\n \"b\": 2, \"c\": 3}"[..],
            b"[1,\n2,\n3]",
            b"{\"text\": \"a\"}\n{\"text\": \"b\"}\n",
            b"\"one text\"",
            b"12",
            b"{% if a %}, {{ b }}\n, c",
            b"plain text\nof two lines",
            "é".repeat(2049).as_bytes(),
            b"\xff\x00\xff",
        ] {
            assert_eq!(describe_content(bytes), None, "{bytes:?}");
        }
        // Cut in the middle of a character, as the first bytes of a longer file may be.
        let long = format!("a{}", "é".repeat(4000));
        assert_eq!(describe_content(long.as_bytes()), None);
    }
}
