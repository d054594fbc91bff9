//! A file on its way to a server, which is never in memory as a whole.

use super::{Client, Failure, file_name};
use crate::output::Terminal;
use crate::progress::Bar;
use anyhow::Context;
use metal_candle::files;
use serde_json::Value;
use std::hash::{BuildHasher, RandomState};
use std::io::{Cursor, Read, Seek};
use std::path::Path;
use ureq::SendBody;
use ureq::http::Method;
use ureq::http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT};

impl Client {
    /// Uploads a file to learn from, and gives what the server says of it.
    pub fn upload(&self, path: &Path, terminal: Terminal) -> anyhow::Result<Value> {
        let (file, metadata) = files::open_regular(path)?;
        let mut read = file.try_clone()?;
        let boundary = boundary();
        let (head, tail) = form(&boundary, &file_name(path));
        let length = metadata.len();
        let bar = Bar::new(terminal, "{bar:8} {bytes}/{total_bytes} uploaded", length);
        let content: Box<dyn Read> = match bar.drawn() {
            Some(bar) => Box::new(bar.wrap_read(file.take(length))),
            None => Box::new(file.take(length)),
        };
        let whole = head.len() as u64 + length + tail.len() as u64;
        let mut body = Cursor::new(head).chain(content).chain(Cursor::new(tail));
        let request = self
            .request(Method::POST, "/v1/files")
            .header(CONTENT_TYPE, format!("multipart/form-data; boundary={boundary}"))
            .header(CONTENT_LENGTH, whole)
            // A server that doesn't want it says so before it is sent.
            .header(EXPECT, "100-continue");
        let sent = self.json(request, SendBody::from_reader(&mut body));
        // Both know the same place in the file.
        let has_begun = read.stream_position()? > 0;
        sent.map_err(|failure| match failure {
            Failure::Unreachable(message) if has_begun => Failure::Unreachable(format!(
                "{message}; a server breaks off what is larger than its --max-file"
            )),
            other => other,
        })
        .with_context(|| format!("cannot upload {}", path.display()))
    }
}

/// What no file has in it but by intent.
fn boundary() -> String {
    let random = || RandomState::new().hash_one(0);
    format!("metal-candle-{:016x}{:016x}", random(), random())
}

/// What is around a file in a form.
fn form(boundary: &str, name: &str) -> (String, String) {
    let name = name.replace('"', "%22").replace('\r', "%0D").replace('\n', "%0A");
    let head = format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nfine-tune\r\n\
         --{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n"
    );
    (head, format!("\r\n--{boundary}--\r\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_name_ends_no_line_of_a_form() {
        let (head, tail) = form("b", "a\"\r\nX: y.jsonl");
        assert!(head.contains("filename=\"a%22%0D%0AX: y.jsonl\"\r\n"), "{head}");
        assert_eq!(head.matches("--b\r\n").count(), 2);
        assert_eq!(tail, "\r\n--b--\r\n");
        assert_ne!(boundary(), boundary());
    }
}
