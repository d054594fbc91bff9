//! Questions to the hub, and files from it.
//!
//! Redirects are followed here and not by the HTTP client, as each step decides two things. The
//! token goes to the endpoint's own origin (scheme, host and port) and, once a redirect has left
//! that, to nobody. And what the endpoint says of a file on the way to its content (commit, etag,
//! size) is what the content is held against.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use ureq::http::{HeaderMap, Method, Request, Response, Uri};
use ureq::{Agent, Body};

use super::cache::{Kind, Repository, length};
use super::check::Check;
use super::names;
use crate::{Error, HubFault, Result};

/// How often something is tried in a row without getting any further.
pub(super) const ATTEMPTS: u32 = 5;
/// The longest wait that a server may ask for, in timeouts: with the default five minutes, over which the hub counts requests.
const LONGEST_WAIT: u32 = 10;
const MAX_REDIRECTS: usize = 10;
/// The longest list of a repository's files that is read, in bytes.
const MAX_LIST: u64 = 64 << 20;
/// How much of a file is read at once, in bytes.
const PIECE: usize = 256 << 10;
/// Asks for a file's bytes as they are, which sizes, ranges and hashes are about.
const IDENTITY: (&str, &str) = ("accept-encoding", "identity");

/// Why something could not be fetched.
pub(super) enum Failure {
    /// The network, for which another attempt or the cache may stand in.
    Network {
        /// What happened, as a sentence without its full stop.
        reason: String,
        /// How long a server asks to wait.
        wait: Duration,
        /// Whether another attempt may come to something else.
        may_pass: bool,
    },
    /// The hub has no such repository for who asks: it is gone, private or gated, or the token is none any more. For this
    /// the cache may stand in, too. What happened, as a sentence without its full stop.
    Refused(String),
    /// Anything else.
    Final(Error),
}

impl Failure {
    /// One of the network that may pass and says nothing of a wait.
    fn network(reason: String) -> Self {
        Self::Network { reason, wait: Duration::ZERO, may_pass: true }
    }
}

/// What the hub says of a repository at one revision.
#[derive(Deserialize)]
pub(super) struct Listing {
    /// The commit that the revision stands for.
    #[serde(rename = "sha")]
    pub(super) commit: String,
    #[serde(rename = "siblings")]
    pub(super) files: Vec<Listed>,
}

/// A file in a [`Listing`]. Of some hubs only its name is given.
#[derive(Deserialize)]
pub(super) struct Listed {
    #[serde(rename = "rfilename")]
    pub(super) name: String,
    pub(super) size: Option<u64>,
    #[serde(rename = "blobId")]
    pub(super) blob: Option<String>,
    pub(super) lfs: Option<ListedLfs>,
}

/// What a [`Listed`] file is in the hub's large storage.
#[derive(Deserialize)]
pub(super) struct ListedLfs {
    pub(super) sha256: String,
    pub(super) size: u64,
}

/// Scheme, host and port.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Origin(String, String, u16);

impl Origin {
    /// Of an address that can be asked.
    fn of(uri: &Uri) -> Option<Self> {
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let default = match scheme.as_str() {
            "https" => 443,
            "http" => 80,
            _ => return None,
        };
        let host = uri.host().filter(|host| !host.is_empty())?.to_ascii_lowercase();
        Some(Self(scheme, host, uri.port_u16().unwrap_or(default)))
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}://{}:{}", self.0, self.1, self.2)
    }
}

/// The address that a `Location` header at `base` stands for.
fn join(base: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next()?;
    let head = location.split(['/', '?']).next()?;
    let text = if head.ends_with(':') {
        location.to_string()
    } else {
        let scheme = base.scheme_str()?;
        let authority = base.authority()?;
        if location.starts_with("//") {
            format!("{scheme}:{location}")
        } else if location.starts_with('/') {
            format!("{scheme}://{authority}{location}")
        } else {
            let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{scheme}://{authority}{folder}/{location}")
        }
    };
    text.parse().ok()
}

/// What is said of a file on the way to its content, the first to say it counting.
#[derive(Default)]
struct Announced {
    commit: Option<String>,
    etag: Option<String>,
    size: Option<u64>,
}

impl Announced {
    fn add(&mut self, headers: &HeaderMap, is_content: bool) {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let mut take = |etag, size| {
            if self.etag.is_none() {
                self.etag = text(etag).map(str::to_string);
            }
            if self.size.is_none() {
                self.size = text(size).and_then(|size| size.trim().parse().ok());
            }
        };
        take("x-linked-etag", "x-linked-size");
        if is_content {
            take("etag", "content-length");
        }
        if self.commit.is_none() {
            self.commit = text("x-repo-commit").map(str::to_string);
        }
    }
}

/// An answer, after all redirects.
struct Answer {
    response: Response<Body>,
    announced: Announced,
    /// Who gave it, if not the endpoint.
    elsewhere: Option<Origin>,
}

impl Answer {
    fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }

    /// Whether it may be another one later: the server is busy or broken, or counts requests.
    fn may_pass(&self) -> bool {
        matches!(self.status(), 408 | 429 | 500..)
    }

    /// How long the server asks to wait. Where it counts requests, the hub says that in a header of
    /// its own.
    fn wait(&self) -> Duration {
        let limited = self.header("ratelimit").filter(|_| self.status() == 429);
        // Servers may also name a time of day, which asks for no wait here.
        let seconds = limited
            .and_then(until_reset)
            .or_else(|| self.header("retry-after")?.trim().parse().ok());
        Duration::from_secs(seconds.unwrap_or(0))
    }
}

/// The seconds until requests are counted anew, by a header such as `"api";r=0;t=55`, which says
/// that none (`r`) are left for so many seconds (`t`). Of several counts, those that are used up.
fn until_reset(header: &str) -> Option<u64> {
    let seconds = header.split(',').filter_map(|count| {
        let number = |name: &str| {
            let mut parts = count.split(';').filter_map(|part| part.trim().split_once('='));
            parts.find(|(key, _)| *key == name)?.1.trim().parse::<u64>().ok()
        };
        number("t").filter(|_| number("r").is_none_or(|left| left == 0))
    });
    seconds.max()
}

/// Asks the hub about one repository.
pub(super) struct Client<'a> {
    agent: Agent,
    repository: Repository<'a>,
    origin: Origin,
}

impl<'a> Client<'a> {
    pub(super) fn new(repository: Repository<'a>) -> Result<Self, Failure> {
        let options = repository.options;
        let uri = options.endpoint.parse::<Uri>().ok();
        let origin = uri.as_ref().and_then(Origin::of).ok_or_else(|| {
            repository.failure(format!("the endpoint {:?} is no address", options.endpoint))
        })?;
        let timeout = Some(options.timeout);
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("metal-candle/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(timeout)
            .timeout_connect(timeout)
            .timeout_send_request(timeout)
            .timeout_recv_response(timeout)
            .timeout_per_read(timeout)
            .timeout_per_write(timeout)
            .build()
            .into();
        Ok(Self { agent, repository, origin })
    }

    /// The repository's commit and files, with their sizes and hashes where the hub tells them. It is asked for
    /// again, as often as the options say, where the cache has nothing to use instead.
    pub(super) fn list(&self, is_cached: impl FnOnce() -> bool) -> Result<Listing, Failure> {
        let attempts = self.repository.options.list_attempts;
        let first = self.list_once();
        let may_pass = matches!(first, Err(Failure::Network { may_pass: true, .. }));
        if !may_pass || attempts <= 1 || is_cached() {
            return first;
        }
        let mut first = Some(first);
        self.persist("the list of its files", attempts, |_| match first.take() {
            Some(first) => first,
            None => self.list_once(),
        })
    }

    fn list_once(&self) -> Result<Listing, Failure> {
        let Repository { kind, id, revision, options } = self.repository;
        let endpoint = &options.endpoint;
        let revision = names::escape(revision, false);
        let address =
            format!("{endpoint}/api/{}/{id}/revision/{revision}?blobs=true", kind.plural());
        let mut answer = self.ask(Method::GET, &address, &[])?;
        if answer.status() != 200 {
            return Err(self.refusal(&answer, None));
        }
        let body = answer.response.body_mut().with_config().limit(MAX_LIST).read_to_vec();
        let body = body.map_err(|error| {
            Failure::network(format!(
                "{endpoint} did not finish its answer: {}",
                self.reason(error)
            ))
        })?;
        let mut listing: Listing = serde_json::from_slice(&body).map_err(|error| {
            self.repository.failure(format!(
                "{endpoint} gave an answer that is not the hub's: {error}; check HF_ENDPOINT"
            ))
        })?;
        if !names::is_commit(&listing.commit) {
            return Err(self.repository.failure(format!(
                "{endpoint} names the commit {:?}, which cannot be one",
                listing.commit
            )));
        }
        listing.files.retain(|file| {
            let is_path = names::is_path(&file.name);
            if !is_path {
                tracing::warn!(
                    "{id}: {endpoint} lists the file {:?}, which is no file's name; it is left out",
                    file.name
                );
            }
            is_path
        });
        Ok(listing)
    }

    /// Brings a file of the commit into the snapshot, unless it is there, and gives its path.
    /// `progress` gets the bytes that are here and those of the whole file.
    pub(super) fn fetch(
        &self,
        commit: &str,
        file: &str,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<PathBuf, Failure> {
        self.fetch_within(u64::MAX, commit, file, progress)
    }

    /// As [`Self::fetch`], of a file that has at most so many bytes.
    pub(super) fn fetch_within(
        &self,
        most: u64,
        commit: &str,
        file: &str,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<PathBuf, Failure> {
        let pointer = self.repository.snapshot(commit).join(file);
        if pointer.exists() {
            return Ok(pointer);
        }
        let remote = self.persist(file, ATTEMPTS, |_| self.describe(commit, file))?;
        if remote.size > most {
            return Err(self
                .repository
                .failure(format!("{file} has {} bytes, expected at most {most}", remote.size)));
        }
        let blob = self.repository.blob(&remote.etag);
        let is_here = || length(&blob) == Some(remote.size);
        if !is_here() {
            let _lock = self.repository.lock(&remote.etag).map_err(Failure::Final)?;
            // Another process may have brought it meanwhile.
            if !is_here() {
                self.download(&remote, progress)?;
            }
        }
        self.repository
            .link(&remote.etag, commit, file)
            .map_err(|error| self.disk_failure(file, error))?;
        Ok(pointer)
    }

    fn address(&self, commit: &str, file: &str) -> String {
        let Repository { kind, id, options, .. } = self.repository;
        let file = names::escape(file, true);
        format!("{}/{}{id}/resolve/{commit}/{file}", options.endpoint, kind.prefix())
    }

    /// What the hub says of a file.
    fn describe<'b>(&self, commit: &str, file: &'b str) -> Result<Remote<'b>, Failure> {
        let address = self.address(commit, file);
        let answer = self.ask(Method::HEAD, &address, &[IDENTITY])?;
        if !(200..400).contains(&answer.status()) {
            return Err(self.refusal(&answer, Some(file)));
        }
        let endpoint = &self.repository.options.endpoint;
        let Announced { commit: found, etag, size } = answer.announced;
        // Both become parts of paths.
        let name = etag.as_deref().and_then(names::etag);
        let (Some(etag), true) = (name, found.as_deref() == Some(commit)) else {
            let quoted =
                |text: Option<String>| text.map_or("none".into(), |text| format!("{text:?}"));
            return Err(self.repository.failure(format!(
                "{endpoint} says of {file}: commit {}, etag {}; expected commit {commit} and an \
                 etag that can be a file's name. Check HF_ENDPOINT",
                quoted(found),
                quoted(etag),
            )));
        };
        let size = match size {
            Some(size) => size,
            None => self.size(&address, file)?,
        };
        Ok(Remote { address, file, etag, size })
    }

    /// The size of a file whose address leads to a server that alone knows it.
    fn size(&self, address: &str, file: &str) -> Result<u64, Failure> {
        let answer = self.ask(Method::GET, address, &[IDENTITY, ("range", "bytes=0-0")])?;
        let size = match answer.status() {
            206 => content_range(&answer).map(|(_, size)| size),
            200 => answer.header("content-length").and_then(|size| size.parse().ok()),
            _ => return Err(self.refusal(&answer, Some(file))),
        };
        size.ok_or_else(|| {
            self.repository.failure(format!(
                "{} does not say how large {file} is",
                self.repository.options.endpoint
            ))
        })
    }

    /// Brings a file into the cache under its etag.
    fn download(&self, remote: &Remote, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Failure> {
        let Remote { file, etag, size, .. } = remote;
        let blob = self.repository.blob(etag);
        let disk = |error| self.disk_failure(file, error);
        let mut partial = Partial::open(blob.with_extension("incomplete"), remote).map_err(disk)?;
        self.persist(file, ATTEMPTS, |reached| {
            let received = self.receive(remote, &mut partial, progress);
            *reached = partial.length;
            received?;
            let check = std::mem::replace(&mut partial.check, Check::new(etag, *size));
            let Err(found) = check.finish(etag) else { return Ok(()) };
            let message = format!("{file} arrived with {found}");
            if partial.inherited {
                // The part that an earlier download left may be what is wrong.
                partial.restart(remote).map_err(disk)?;
                return Err(Failure::network(message));
            }
            fs::remove_file(&partial.path).map_err(disk)?;
            Err(self.repository.failure(format!(
                "{message}, which is what {} announced: it was damaged or changed on the way, and \
                 nothing of it was kept. Try again; if it stays so, ask who runs the network or the \
                 mirror in between",
                self.repository.options.endpoint
            )))
        })?;
        partial.file.sync_all().map_err(disk)?;
        match fs::rename(&partial.path, &blob) {
            // Where locks don't work, another process may have been faster.
            Err(error) if length(&blob) != Some(*size) => Err(disk(error)),
            _ => Ok(()),
        }
    }

    /// Receives what is missing of a file.
    fn receive(
        &self,
        remote: &Remote,
        partial: &mut Partial,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Failure> {
        let Remote { address, file, size, .. } = remote;
        let disk = |error| self.disk_failure(file, error);
        if partial.length > *size {
            partial.restart(remote).map_err(disk)?;
        }
        progress(partial.length, *size);
        if partial.length == *size {
            return Ok(());
        }
        let range = format!("bytes={}-", partial.length);
        let mut headers = vec![IDENTITY];
        if partial.length > 0 {
            headers.push(("range", &range));
        }
        let answer = self.ask(Method::GET, address, &headers)?;
        match answer.status() {
            200 => partial.restart(remote).map_err(disk)?,
            206 if content_range(&answer) == Some((partial.length, *size)) => {}
            206 | 416 => {
                partial.restart(remote).map_err(disk)?;
                return Err(Failure::network(format!("{file} cannot be continued")));
            }
            _ => return Err(self.refusal(&answer, Some(file))),
        }
        let mut reader = answer.response.into_body().into_reader();
        let mut piece = vec![0; PIECE];
        loop {
            let broke = |error: String, length| {
                Failure::network(format!(
                    "the download of {file} broke off after {length} of {size} bytes: {error}"
                ))
            };
            let bytes = match reader.read(&mut piece) {
                Ok(count) => piece.get(..count).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broke(self.reason(error.into()), partial.length)),
            };
            if bytes.is_empty() && partial.length < *size {
                return Err(broke("the connection was closed".into(), partial.length));
            }
            if bytes.is_empty() {
                return Ok(());
            }
            if partial.length + bytes.len() as u64 > *size {
                fs::remove_file(&partial.path).map_err(disk)?;
                return Err(self.repository.failure(format!(
                    "{file} goes on after the {size} bytes that {} announced; nothing of it was kept",
                    self.repository.options.endpoint
                )));
            }
            partial.add(bytes).map_err(disk)?;
            progress(partial.length, *size);
        }
    }

    /// Tries again what the network broke, for as long as it gets further within so many attempts,
    /// and not before a server says. `attempt` says how far it came, in bytes.
    fn persist<T>(
        &self,
        file: &str,
        attempts: u32,
        mut attempt: impl FnMut(&mut u64) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let (mut furthest, mut fruitless) = (0, 0);
        loop {
            let mut reached = 0;
            let (reason, wait) = match attempt(&mut reached) {
                Err(Failure::Network { reason, wait, may_pass: true }) => (reason, wait),
                other => return other,
            };
            if reached > furthest {
                furthest = reached;
                fruitless = 0;
            }
            fruitless += 1;
            if fruitless == attempts {
                return Err(Failure::network(format!(
                    "{reason} (given up after {attempts} attempts that came no further)"
                )));
            }
            let timeout = self.repository.options.timeout;
            let longest = timeout.saturating_mul(LONGEST_WAIT);
            if wait > longest {
                return Err(Failure::network(format!(
                    "{reason}; {} s are more than the {} s that are waited at most ({LONGEST_WAIT} times \
                     HF_HUB_DOWNLOAD_TIMEOUT), so try again later",
                    wait.as_secs(),
                    longest.as_secs_f64()
                )));
            }
            // Half a second with the default, and then twice as long each time.
            let pause = (timeout / 60).saturating_mul(1 << (fruitless - 1).min(16)).max(wait);
            tracing::warn!(
                "{}: {file}: {reason}; trying again in {:.1} s",
                self.repository.id,
                pause.as_secs_f64()
            );
            std::thread::sleep(pause);
        }
    }

    /// Sends a request, with the token where it belongs, and follows redirects. The question for
    /// headers alone ends at the endpoint once that has named the etag.
    fn ask(
        &self,
        method: Method,
        address: &str,
        headers: &[(&str, &str)],
    ) -> Result<Answer, Failure> {
        let options = self.repository.options;
        let unreadable = |address: &str| {
            self.repository.failure(format!(
                "{} redirected to {address:?}, which is no address of http or https",
                options.endpoint
            ))
        };
        let mut uri: Uri = address.parse().map_err(|_| unreadable(address))?;
        let mut announced = Announced::default();
        let mut is_home = true;
        for _ in 0..MAX_REDIRECTS {
            let origin = Origin::of(&uri).ok_or_else(|| unreadable(&uri.to_string()))?;
            is_home &= origin == self.origin;
            let mut request = Request::builder().method(method.clone()).uri(uri.clone());
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            if let Some(token) = options.token.as_ref().filter(|_| is_home) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let request = request.body(()).map_err(|error| {
                self.repository.failure(format!("{address} cannot be asked for: {error}"))
            })?;
            let response = self.agent.run(request).map_err(|error| {
                let who = if is_home { options.endpoint.clone() } else { origin.to_string() };
                Failure::network(format!("{who} cannot be reached: {}", self.reason(error)))
            })?;
            let status = response.status().as_u16();
            announced.add(response.headers(), status == 200);
            let elsewhere = (!is_home).then_some(origin);
            if !matches!(status, 301 | 302 | 303 | 307 | 308) {
                return Ok(Answer { response, announced, elsewhere });
            }
            let location = response.headers().get("location").map(|value| value.as_bytes());
            let location = String::from_utf8_lossy(location.unwrap_or_default());
            let next = join(&uri, &location).ok_or_else(|| unreadable(&location))?;
            let target = Origin::of(&next).ok_or_else(|| unreadable(&location))?;
            if method == Method::HEAD && target != self.origin && announced.etag.is_some() {
                return Ok(Answer { response, announced, elsewhere });
            }
            if uri.scheme_str() == Some("https") && target.0 == "http" {
                return Err(self.repository.failure(format!(
                    "{} redirected to {target}, where nothing is encrypted; refused",
                    options.endpoint
                )));
            }
            uri = next;
        }
        Err(self
            .repository
            .failure(format!("{} redirected more than {MAX_REDIRECTS} times", options.endpoint)))
    }

    /// What the HTTP client says, in words.
    fn reason(&self, error: ureq::Error) -> String {
        match error {
            ureq::Error::Timeout(_) => format!(
                "nothing came for {} s (HF_HUB_DOWNLOAD_TIMEOUT sets the time)",
                self.repository.options.timeout.as_secs_f64()
            ),
            ureq::Error::Io(error) => error.to_string(),
            other => other.to_string(),
        }
    }

    /// The failure that an answer's status stands for. `file` is what was asked for; `None` is the
    /// repository itself.
    fn refusal(&self, answer: &Answer, file: Option<&str>) -> Failure {
        let Repository { kind, options, revision, .. } = self.repository;
        let (endpoint, noun) = (&options.endpoint, kind.noun());
        let status = answer.status();
        let code = answer.header("x-error-code").unwrap_or_default();
        let what = file.map_or(String::new(), |file| format!(" to {file}"));
        // Where a file lies elsewhere, each attempt is sent to an address that was made anew for it.
        let may_pass = file.is_some() || answer.may_pass();
        let network = |said: String, more: &str| {
            let wait = answer.wait();
            let asked = match wait.is_zero() {
                true => String::new(),
                false => format!(" and asks to wait for {} s", wait.as_secs()),
            };
            Failure::Network { reason: format!("{said}{asked}{more}"), wait, may_pass }
        };
        if let Some(elsewhere) = &answer.elsewhere {
            let token =
                if options.token.is_some() { "; the token is for the endpoint alone" } else { "" };
            let said = format!(
                "{elsewhere}, to which {endpoint} redirected{what}, answered with status {status}"
            );
            return network(said, token);
        }
        let token = if options.token.is_some() {
            "the token given (HF_TOKEN or the saved one) has no access"
        } else {
            "no token was given; set HF_TOKEN to one that has access"
        };
        let failure =
            |message: String| Failure::Final(self.repository.error_of(HubFault::NotFound, message));
        let here = match kind {
            Kind::Adapter => "",
            Kind::Model | Kind::Dataset => ", and no folder of this name here",
        };
        match status {
            401 if file.is_none() && code != "GatedRepo" => Failure::Refused(format!(
                "{endpoint} refused access (status 401): the {noun} does not exist under this id, or \
                 it is private or gated and {token}"
            )),
            401 | 403 => Failure::Refused(format!(
                "{endpoint} refused access{what} (status {status}): the {noun} is private or gated; \
                 accept its terms on its page there. {token}"
            )),
            404 if code == "RevisionNotFound" => {
                failure(format!("{endpoint} has this {noun}, but no revision {revision:?}"))
            }
            404 => match file {
                Some(file) => failure(format!("{endpoint} does not have its file {file}")),
                None => Failure::Refused(format!(
                    "there is no {noun} of this id at {endpoint} (revision {revision}){here}"
                )),
            },
            _ if answer.may_pass() => {
                network(format!("{endpoint} answered{what} with status {status}"), "")
            }
            _ => self.repository.failure(format!("{endpoint} answered{what} with status {status}")),
        }
    }

    fn disk_failure(&self, file: &str, error: io::Error) -> Failure {
        self.repository.failure(format!(
            "{file} cannot be written to the cache {}: {error}; free some space, or set HF_HOME to \
             a folder that can be written to",
            self.repository.options.cache.display()
        ))
    }
}

/// A file as the hub describes it.
struct Remote<'a> {
    address: String,
    file: &'a str,
    /// Its name in the cache.
    etag: String,
    size: u64,
}

/// Where a `206` answer starts, and the size of the whole file.
fn content_range(answer: &Answer) -> Option<(u64, u64)> {
    let (range, size) = answer.header("content-range")?.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, size.parse().ok()?))
}

/// As much of a file as has arrived.
struct Partial {
    path: PathBuf,
    file: File,
    length: u64,
    check: Check,
    /// Whether some of it was left by an earlier download.
    inherited: bool,
}

impl Partial {
    /// Continues what an earlier download left.
    fn open(path: PathBuf, remote: &Remote) -> io::Result<Self> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let mut file =
            File::options().create(true).truncate(false).read(true).write(true).open(&path)?;
        let mut check = Check::new(&remote.etag, remote.size);
        let mut length = 0;
        let mut piece = vec![0; PIECE];
        loop {
            let count = match file.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            check.add(piece.get(..count).unwrap_or_default());
            length += count as u64;
        }
        Ok(Self { path, file, length, check, inherited: length > 0 })
    }

    fn restart(&mut self, remote: &Remote) -> io::Result<()> {
        self.file.set_len(0)?;
        self.length = 0;
        self.check = Check::new(&remote.etag, remote.size);
        self.inherited = false;
        Ok(())
    }

    /// Writes at the place that the bytes have in the file, so that two processes on a file system
    /// without locks write the same.
    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.length))?;
        self.file.write_all(bytes)?;
        self.check.add(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let origin = |text| Origin::of(&uri(text));
        let hub = origin("https://huggingface.co/a?b");
        assert!(hub.is_some());
        for same in
            ["https://huggingface.co:443/", "HTTPS://HuggingFace.co/x", "https://u@huggingface.co"]
        {
            assert_eq!(origin(same), hub, "{same}");
        }
        for other in [
            "http://huggingface.co/",
            "https://huggingface.co:8443/",
            "https://huggingface.co.evil.org/",
            "https://huggingface.co@evil.org/",
            "https://cdn.huggingface.co/",
            "https://huggingface.co./",
        ] {
            assert_ne!(origin(other), hub, "{other}");
        }
        assert_eq!(origin("ftp://huggingface.co/"), None);
        assert_eq!(origin("/path"), None);
    }

    #[test]
    fn a_count_of_requests_says_when_it_begins_anew() {
        for (header, seconds) in [
            ("\"api\";r=0;t=55", Some(55)),
            (" \"resolvers\" ; t=7 ; r=0 ", Some(7)),
            ("\"api\";r=3;t=55, \"pages\";r=0;t=20", Some(20)),
            ("\"api\";r=0;t=5,\"pages\";r=0;t=20", Some(20)),
            ("\"api\";t=9", Some(9)),
            ("\"api\";r=3;t=55", None),
            ("\"api\";r=0;t=soon", None),
            ("\"api\";r=0", None),
            ("", None),
        ] {
            assert_eq!(until_reset(header), seconds, "{header}");
        }
    }

    #[test]
    fn a_location_is_joined_to_its_base() {
        let base = uri("http://hub:80/a/b?c");
        for (location, expected) in [
            ("https://cdn/x?y#z", "https://cdn/x?y"),
            ("//cdn/x", "http://cdn/x"),
            ("/x?u=http://y", "http://hub:80/x?u=http://y"),
            ("x/y", "http://hub:80/a/x/y"),
            ("x?u=http://y", "http://hub:80/a/x?u=http://y"),
        ] {
            assert_eq!(join(&base, location).unwrap(), uri(expected), "{location}");
        }
        assert!(join(&base, "https://a b/").is_none());
        for no_http in ["file:///etc/passwd", "ftp://hub/x"] {
            assert!(join(&base, no_http).is_none_or(|uri| Origin::of(&uri).is_none()), "{no_http}");
        }
    }
}
