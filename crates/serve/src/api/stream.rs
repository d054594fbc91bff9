//! Answers that are read from the disk while they are sent.

use crate::app::Shared;
use crate::error::ApiError;
use axum::body::{Body, Bytes};
use axum::http::header::{
    CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::{IntoResponse, Response};
use futures_util::stream::poll_fn;
use std::fs::File;
use std::io::{self, Read};
use std::time::Duration;
use tokio::sync::mpsc::{self, error::SendTimeoutError};
use tracing::Instrument;

/// Bytes that are read at once. Between two such pieces no thread waits for the one who reads the answer.
const PIECE: u64 = 256 << 10;
/// Tar's unit: a header is one, and a file is filled up to whole ones.
const BLOCK: u64 = 512;

/// `length` bytes, as a file of this name that a browser saves. An answer that fails under way is cut off, as is one that
/// nobody reads for as long as the server's options allow; the reader goes with it.
pub(super) fn download(
    app: &Shared,
    name: &str,
    content_type: &'static str,
    length: u64,
    reader: impl Read + Send + 'static,
) -> Response {
    let (sender, mut pieces) = mpsc::channel(1);
    tokio::spawn(send(reader, sender, app.options.timeout).in_current_span());
    let pieces = poll_fn(move |context| pieces.poll_recv(context));
    let headers = [
        (CONTENT_TYPE, content_type.to_string()),
        (CONTENT_LENGTH, length.to_string()),
        (CONTENT_DISPOSITION, format!("attachment; filename=\"{}\"", plain(name))),
        (X_CONTENT_TYPE_OPTIONS, "nosniff".to_string()),
    ];
    (headers, Body::from_stream(pieces)).into_response()
}

/// Sends what is read, a piece after the other.
async fn send(
    mut reader: impl Read + Send + 'static,
    sender: mpsc::Sender<io::Result<Bytes>>,
    patience: Duration,
) {
    loop {
        let read = tokio::task::spawn_blocking(|| next(reader)).await;
        let piece = match read.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(None) => return,
            Ok(Some((piece, rest))) => {
                reader = rest;
                Ok(piece)
            }
            Err(error) => {
                tracing::error!("a download was cut off: {error}");
                // It is cut off whether or not anybody is there.
                let _ = sender.send_timeout(Err(error), patience).await;
                return;
            }
        };
        if let Err(error) = sender.send_timeout(piece, patience).await {
            if matches!(error, SendTimeoutError::Timeout(_)) {
                tracing::warn!("a download that nobody reads was cut off");
            }
            return;
        }
    }
}

/// The next piece, and the rest.
fn next<R: Read>(mut reader: R) -> io::Result<Option<(Bytes, R)>> {
    let mut piece = Vec::new();
    (&mut reader).take(PIECE).read_to_end(&mut piece)?;
    Ok((!piece.is_empty()).then(|| (piece.into(), reader)))
}

/// A file of an archive.
pub(super) struct Entry {
    name: String,
    size: u64,
    content: Box<dyn Read + Send>,
}

impl Entry {
    /// One of `size` bytes.
    pub fn new(name: impl Into<String>, size: u64, content: impl Read + Send + 'static) -> Self {
        Self { name: name.into(), size, content: Box::new(content.take(size)) }
    }

    /// A file as it is on the disk.
    ///
    /// # Errors
    /// When its size cannot be had.
    pub fn of(name: impl Into<String>, file: File) -> Result<Self, ApiError> {
        let size = file.metadata().map_err(ApiError::internal)?.len();
        Ok(Self::new(name, size, file))
    }
}

/// Files by their names, as a tar with a folder of this name, and its length. The same files give the same bytes.
///
/// # Errors
/// For names that tar has no room for.
pub(super) fn archive(
    folder: &str,
    entries: Vec<Entry>,
) -> Result<(u64, impl Read + Send + use<>), ApiError> {
    let mut length = 2 * BLOCK;
    let mut reader: Box<dyn Read + Send> = Box::new(io::empty());
    for Entry { name, size, content } in entries {
        let mut header = tar::Header::new_gnu();
        header.set_path(format!("{folder}/{name}")).map_err(ApiError::internal)?;
        header.set_size(size);
        header.set_mode(0o644);
        header.set_cksum();
        let filler = size.next_multiple_of(BLOCK) - size;
        length += BLOCK + size + filler;
        let header = io::Cursor::new(header.as_bytes().to_vec());
        let content = content.chain(io::repeat(0).take(filler));
        reader = Box::new(reader.chain(header).chain(content));
    }
    Ok((length, reader.chain(io::repeat(0).take(2 * BLOCK))))
}

/// A name for a header: without what has a meaning there.
fn plain(name: &str) -> String {
    const MOST: usize = 200;
    let allowed =
        |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_' | ' ');
    let letters = name.chars().map(|letter| if allowed(letter) { letter } else { '_' });
    letters.take(MOST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_read_as_one() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = [0, 1, 511, 512, 513, 300_000];
        let names = ["a", "b", "c", "d", "e", "f"];
        let open = || {
            let files = names.into_iter().zip(sizes).map(|(name, size)| {
                let path = folder.path().join(name);
                std::fs::write(&path, vec![name.as_bytes()[0]; size]).unwrap();
                Entry::of(name, File::open(path).unwrap()).unwrap()
            });
            archive("adapter", files.collect()).unwrap()
        };
        let (length, mut reader) = open();
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, length);
        let mut again = Vec::new();
        open().1.read_to_end(&mut again).unwrap();
        assert_eq!(again, bytes);
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut found = 0;
        for (entry, (name, size)) in archive.entries().unwrap().zip(names.into_iter().zip(sizes)) {
            let mut entry = entry.unwrap();
            assert_eq!(entry.path().unwrap().to_str(), Some(format!("adapter/{name}").as_str()));
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            assert_eq!(content, vec![name.as_bytes()[0]; size]);
            found += 1;
        }
        assert_eq!(found, names.len());
    }

    #[test]
    fn names_in_headers_are_plain() {
        assert_eq!(plain("a b-c_1.csv"), "a b-c_1.csv");
        assert_eq!(plain("\"; x=\r\n\u{e4}/.."), "__ x_____..");
        assert_eq!(plain(&"x".repeat(1000)).len(), 200);
    }
}
