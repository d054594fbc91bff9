//! A hub on this machine with one model and one data set `owner/name`, which can be told to lie,
//! to break off, to go silent and to redirect.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use sha1::Sha1;
use sha2::{Digest, Sha256};

pub(super) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub(super) const OTHER: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// What a server does once it has sent so many bytes of a file in one answer.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Then {
    Close,
    Silence,
}

/// What a server answers with, and what it was asked.
pub(super) struct State {
    pub(super) commit: String,
    pub(super) files: BTreeMap<String, Vec<u8>>,
    /// The status of the repository, and of each file.
    pub(super) status: (u16, u16),
    pub(super) error_code: &'static str,
    /// Statuses and headers of the next answers about the repository, the last one first.
    pub(super) refusals: Vec<(u16, &'static str)>,
    /// Where questions about the repository are redirected.
    pub(super) list_moved: Option<String>,
    /// A file that is redirected, as large files are, and the address before `/cdn/<file>`.
    pub(super) file_moved: Option<(&'static str, String)>,
    /// Whether redirects of files name commit, etag and size, and their target does not.
    pub(super) names_first: bool,
    /// A file whose answers end after so many bytes.
    pub(super) cut: Option<(&'static str, usize, Then)>,
    /// What is sent for a file instead of its content.
    pub(super) altered: Option<(&'static str, Vec<u8>)>,
    /// Whether ranges are answered as such.
    pub(super) has_ranges: bool,
    /// Whether etags are hashes of the content.
    pub(super) has_hashes: bool,
    /// The etag of every file, if not its own.
    pub(super) etag: Option<&'static str>,
    pub(super) requests: Vec<Asked>,
    /// Connections that are kept open and silent.
    silent: Vec<TcpStream>,
}

/// A request that a server got.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Asked {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) host: String,
    pub(super) token: Option<String>,
    pub(super) range: Option<usize>,
}

pub(super) struct Server {
    pub(super) endpoint: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    pub(super) fn new(files: &[(&str, &[u8])]) -> Self {
        let state = Arc::new(Mutex::new(State {
            commit: COMMIT.to_string(),
            files: files.iter().map(|(n, c)| (n.to_string(), c.to_vec())).collect(),
            status: (200, 200),
            error_code: "",
            refusals: Vec::new(),
            list_moved: None,
            file_moved: None,
            names_first: true,
            cut: None,
            altered: None,
            has_ranges: true,
            has_hashes: true,
            etag: None,
            requests: Vec::new(),
            silent: Vec::new(),
        }));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that goes away early is none of the server's business.
                let _ = answer(stream.unwrap(), &shared);
            }
        });
        Self { endpoint, state }
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    /// What was asked since the last call.
    pub(super) fn requests(&self) -> Vec<Asked> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }
}

/// The etag that the hub gives a file: files of weights and tables are in its large storage.
pub(super) fn hub_etag(name: &str, content: &[u8]) -> String {
    let bytes: Vec<u8> = if name.ends_with(".safetensors") || name.ends_with(".parquet") {
        Sha256::digest(content).to_vec()
    } else {
        let blob = [format!("blob {}\0", content.len()).as_bytes(), content].concat();
        Sha1::digest(blob).to_vec()
    };
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read_request(stream: &TcpStream) -> io::Result<Asked> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split(' ').map(str::to_string);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut asked = Asked { method, path, host: String::new(), token: None, range: None };
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header)? == 0 || header.trim().is_empty() {
            return Ok(asked);
        }
        let (name, value) = header.split_once(':').unwrap();
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "host" => asked.host = value.to_string(),
            "authorization" => asked.token = Some(value.to_string()),
            "range" => {
                let (from, _) = value["bytes=".len()..].split_once('-').unwrap();
                asked.range = Some(from.parse().unwrap());
            }
            _ => {}
        }
    }
}

fn answer(mut stream: TcpStream, state: &Mutex<State>) -> io::Result<()> {
    let asked = read_request(&stream)?;
    let state = &mut *state.lock().unwrap();
    state.requests.push(asked.clone());
    let is_head = asked.method == "HEAD";
    let mut reply = |status: u16, headers: &str, body: &[u8], sent: usize| {
        write!(
            stream,
            "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n",
            body.len()
        )?;
        if is_head { Ok(()) } else { stream.write_all(&body[..sent.min(body.len())]) }
    };
    let all = usize::MAX;
    let path = asked.path.as_str();
    if path.starts_with("/api/") {
        if let Some(base) = &state.list_moved {
            return reply(307, &format!("Location: {base}{path}\r\n"), b"", all);
        }
        if let Some((status, headers)) = state.refusals.pop() {
            return reply(status, headers, b"", all);
        }
        let known = ["/api/models/owner/name/revision/", "/api/datasets/owner/name/revision/"];
        if !known.iter().any(|known| path.starts_with(known)) {
            return reply(404, "", b"", all);
        }
        let siblings = state
            .files
            .iter()
            .map(|(name, content)| {
                let mut file = serde_json::json!({ "rfilename": name });
                if path.ends_with("?blobs=true") && state.has_hashes {
                    let etag = hub_etag(name, content);
                    file["size"] = content.len().into();
                    file["blobId"] = hub_etag("plain", content).into();
                    if etag.len() == 64 {
                        file["lfs"] = serde_json::json!({ "sha256": etag, "size": content.len() });
                    }
                }
                file
            })
            .collect::<Vec<_>>();
        let body = serde_json::json!({ "sha": state.commit, "siblings": siblings }).to_string();
        let code = format!("X-Error-Code: {}\r\n", state.error_code);
        return reply(state.status.0, &code, body.as_bytes(), all);
    }
    let resolved = format!("owner/name/resolve/{}/", state.commit);
    let path = path.trim_start_matches("/datasets").trim_start_matches('/');
    let (name, is_home) = match (path.strip_prefix(&resolved), path.strip_prefix("cdn/")) {
        (Some(name), _) => (name.replace("%20", " "), true),
        (None, Some(name)) => (name.to_string(), false),
        (None, None) => return reply(404, "", b"", all),
    };
    let Some(content) = state.files.get(&name) else { return reply(404, "", b"", all) };
    if state.status.1 != 200 {
        return reply(state.status.1, "", b"", all);
    }
    let etag = match state.etag {
        Some(etag) => etag.to_string(),
        None if state.has_hashes => hub_etag(&name, content),
        None => format!("x{}", content.len()),
    };
    let commit = &state.commit;
    if let Some((moved, base)) = &state.file_moved
        && *moved == name
        && is_home
    {
        let named = format!(
            "X-Repo-Commit: {commit}\r\nX-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {}\r\n",
            content.len()
        );
        let named = if state.names_first { &named } else { "" };
        return reply(302, &format!("{named}Location: {base}/cdn/{name}\r\n"), b"", all);
    }
    let mut headers = if is_home || !state.names_first {
        format!("X-Repo-Commit: {commit}\r\nETag: \"{etag}\"\r\n")
    } else {
        "ETag: \"of-the-storage\"\r\n".to_string()
    };
    let body = match &state.altered {
        Some((altered, body)) if *altered == name && !is_head => body,
        _ => content,
    };
    let mut from = 0;
    if let Some(start) = asked.range.filter(|_| state.has_ranges) {
        if start >= body.len() {
            return reply(416, "", b"", all);
        }
        from = start;
        headers += &format!("Content-Range: bytes {start}-{}/{}\r\n", body.len() - 1, body.len());
    }
    let status = if headers.contains("Content-Range") { 206 } else { 200 };
    match state.cut {
        Some((cut, bytes, then)) if cut == name => {
            reply(status, &headers, &body[from..], bytes)?;
            if then == Then::Silence {
                state.silent.push(stream);
            }
            Ok(())
        }
        _ => reply(status, &headers, &body[from..], all),
    }
}
