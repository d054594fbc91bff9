//! Reading files that nobody vouches for: what kind of file it is and how large is known before it is read, and what
//! is wrong with its content is told with its place.

use std::fs::{File, Metadata, OpenOptions};
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;
use serde::de::DeserializeOwned;

use super::content::describe_content;
use super::words::plain;
use crate::{Error, Result};

/// The largest JSON file that [`read_json`] reads, in bytes.
pub const MAX_JSON_BYTES: u64 = 64 << 20;

/// Opens a regular file for reading. The files of a model are such; a pipe would make its reader wait for ever, and a
/// device has no end.
///
/// # Errors
/// [`Error::Io`] when it cannot be opened; [`Error::File`] when it is a folder, a pipe, a socket or a device.
pub fn open_regular(path: impl AsRef<Path>) -> Result<(File, Metadata)> {
    let path = path.as_ref();
    // Some devices act when they are opened, so what can be known is known before.
    check_regular(path, &std::fs::metadata(path).map_err(Error::io(path))?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // A pipe that took the file's place meanwhile is opened without waiting for its writer.
        options.custom_flags(libc::O_NONBLOCK);
    }
    let file = options.open(path).map_err(Error::io(path))?;
    let metadata = file.metadata().map_err(Error::io(path))?;
    check_regular(path, &metadata)?;
    Ok((file, metadata))
}

/// Gives back the memory that these bytes of a file take. They come again when they are read. It is for what was copied
/// and would count twice: once where it went, and once as a part of the mapping, which is as [`Mmap::map`] makes it.
/// Windows keeps the memory, and macOS as long as it has enough.
pub(crate) fn release(map: &Mmap, bytes: Range<usize>) {
    /// Where less is given back, telling the system costs more than it brings.
    const LEAST: usize = 1 << 16;
    if bytes.len() < LEAST || bytes.end > map.len() {
        return;
    }
    #[cfg(unix)]
    {
        use memmap2::UncheckedAdvice;
        // SAFETY: what stands behind a mapping that is shared and read-only is the file, so that its bytes stay what they
        // are. If the system refuses, the memory is held for longer.
        let _ = unsafe {
            map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len())
        };
    }
}

fn check_regular(path: &Path, metadata: &Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let found = if metadata.is_dir() { "a folder" } else { "a pipe, a socket or a device" };
    Err(Error::file(path, format!("is {found}; a regular file was expected")))
}

/// Reads a JSON file of at most [`MAX_JSON_BYTES`] into a type.
///
/// # Errors
/// [`Error::Io`] when it cannot be read; [`Error::File`] when it is no regular file or too large, or when its content
/// is not JSON or not what `T` asks for, with the line, the column, the key and the reason.
pub fn read_json<T: DeserializeOwned>(path: impl AsRef<Path>) -> Result<T> {
    let path = path.as_ref();
    let bytes = read_limited(path, MAX_JSON_BYTES)?;
    parse_json(&bytes).map_err(|message| Error::file(path, message))
}

/// Reads JSON into a type.
///
/// # Errors
/// The line, the column and the key of the mistake, what was found and what was expected; or what the content is
/// instead of JSON.
pub(crate) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(bytes).map_err(|error| {
        if !error.is_data()
            && let Some(what) = describe_content(bytes)
        {
            return format!("is {what}; JSON was expected");
        }
        let place = match error.line() {
            // Serde counts from 1; 0 means that the content as a whole did not fit.
            0 => String::new(),
            line => format!("line {line}, column {}: ", error.column()),
        };
        if !error.is_data() {
            return format!("{place}malformed JSON: {}", plain(&error.to_string()));
        }
        // Which key it is costs a second look, for those that go wrong alone.
        let mut reader = serde_json::Deserializer::from_slice(bytes);
        let key = match serde_path_to_error::deserialize::<_, T>(&mut reader) {
            Err(error) if error.path().iter().len() > 0 => format!("{}: ", error.path()),
            _ => String::new(),
        };
        format!("{place}{key}{}", plain(&error.to_string()))
    })
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// [`Error::Io`] when it cannot be read, [`Error::File`] when it is a folder, a pipe or a device, or larger.
pub fn read_limited(path: impl AsRef<Path>, limit: u64) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let (file, metadata) = open_regular(path)?;
    read_at_most(path, file, &metadata, limit)
}

/// [`read_limited`] of a file that may also be a pipe, as a shell's `<(command)` is: for what a person names, not for
/// what a model's folder holds.
///
/// # Errors
/// [`Error::Io`] when it cannot be read, [`Error::File`] when it is a folder or larger.
pub fn read_limited_or_piped(path: impl AsRef<Path>, limit: u64) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let file = File::open(path).map_err(Error::io(path))?;
    let metadata = file.metadata().map_err(Error::io(path))?;
    if metadata.is_dir() {
        check_regular(path, &metadata)?;
    }
    read_at_most(path, file, &metadata, limit)
}

/// [`read_limited`] as text.
///
/// # Errors
/// As [`read_limited`], and [`Error::File`] when it isn't UTF-8.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<String> {
    let bytes = read_limited(path, limit)?;
    String::from_utf8(bytes).map_err(|error| {
        let start = error.utf8_error().valid_up_to();
        let message = match describe_content(error.as_bytes()) {
            Some(what) => format!("is {what}; text was expected"),
            None => format!("is no text in UTF-8: byte {start} is none of a character"),
        };
        Error::file(path, message)
    })
}

fn read_at_most(path: &Path, file: File, metadata: &Metadata, limit: u64) -> Result<Vec<u8>> {
    let too_large = |size: u64| {
        Error::file(path, format!("has {size} bytes; at most {limit} are read from such a file"))
    };
    if metadata.len() > limit {
        return Err(too_large(metadata.len()));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
    // A pipe or a file that grows reports no size of its own, so the limit holds here too.
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(Error::io(path))?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(bytes)
}

/// How many bytes of this process's memory are pages of a file that it has mapped.
#[cfg(all(test, target_os = "linux"))]
pub(crate) fn resident_bytes(path: &Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let path = path.canonicalize().unwrap();
    let of_file = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
    let resident = of_file.into_iter().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    resident.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Needed {
        rank: usize,
        #[serde(default)]
        layers: Vec<Layer>,
    }

    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Layer {
        width: u32,
    }

    #[test]
    fn json_errors_name_the_file_the_place_the_key_and_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let message = |content: &[u8]| {
            fs::write(&path, content).unwrap();
            let message = read_json::<Needed>(&path).unwrap_err().to_string();
            message.strip_prefix(&format!("{}: ", path.display())).unwrap().to_string()
        };
        assert_eq!(
            message(b"{\n \"rank\": 8,,\n}"),
            "line 2, column 12: malformed JSON: key must be a string"
        );
        assert_eq!(
            message(b"{\"rank\": \"eight\"}"),
            "line 1, column 16: rank: expected a whole number from 0, found \"eight\""
        );
        assert_eq!(
            message(b"{\"rank\": 1, \"layers\": [{\"width\": 1}, {\"width\": -3}]}"),
            "line 1, column 49: layers[1].width: expected a whole number from 0, found -3"
        );
        assert!(message(b"{}").ends_with("the key `rank` is missing"));
        assert_eq!(message(b""), "is empty; JSON was expected");
        assert!(message(b"\xff\xfe{\0").contains("UTF-16"));
        assert!(message(b"\xef\xbb\xbf{\"rank\": 8}").contains("byte-order mark"));
        assert!(message(b"version https://git-lfs.github.com/spec/v1\n").contains("Git LFS"));
        assert!(message(b"<html>").contains("a web page"));
        fs::write(&path, "{\"rank\": 8}").unwrap();
        assert_eq!(read_json::<Needed>(&path).unwrap(), Needed { rank: 8, layers: Vec::new() });

        File::create(&path).unwrap().set_len(MAX_JSON_BYTES + 1).unwrap();
        assert!(read_json::<Needed>(&path).unwrap_err().to_string().contains("at most 67108864"));
        assert!(read_json::<Needed>(folder.path()).unwrap_err().to_string().contains("a folder"));
    }

    #[cfg(unix)]
    #[test]
    fn only_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: the name is a C string that lives through the call.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        for path in [&pipe, &link] {
            let error = read_limited(path, 10).unwrap_err().to_string();
            assert!(error.contains("a pipe, a socket or a device"), "{error}");
            assert!(open_regular(path).is_err());
        }
        // What a person names may be one.
        let writer = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::write(pipe, "rank: 8").unwrap()
        });
        assert_eq!(read_limited_or_piped(&pipe, 10).unwrap(), b"rank: 8");
        writer.join().unwrap();
        assert!(read_limited_or_piped("/dev/zero", 10).is_err());
    }

    #[test]
    fn text_that_is_none_says_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jinja");
        for (bytes, expected) in
            [(&b"PK\x03\x04\xff"[..], "zip archive"), (b"abc\xff\xff", "byte 3")]
        {
            fs::write(&path, bytes).unwrap();
            let error = read_text(&path, 100).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
