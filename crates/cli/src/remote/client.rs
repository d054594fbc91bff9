//! Questions to a server.

use super::{Access, Address, Failure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::Read;
use std::time::Duration;
use ureq::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use ureq::http::request::Builder;
use ureq::http::{HeaderName, HeaderValue, Method, Request, Response};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, AsSendBody, Body};

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);
/// How long nothing may come, or nothing be taken; streams without events say within it that they are there.
const SILENCE: Duration = Duration::from_secs(60);
/// Bytes of an answer that is held in memory, at most.
const MOST: u64 = 64 << 20;
const JSON: &str = "application/json";

#[derive(Deserialize)]
struct List {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

/// One who asks a server.
pub struct Client {
    agent: Agent,
    base: String,
    authorization: Option<HeaderValue>,
}

impl Client {
    /// One who asks the server that is given, that of the environment, or else the usual one.
    pub fn new(server: Option<&str>, access: &Access) -> anyhow::Result<Self> {
        let Address { base, is_local } = Address::find(server)?;
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // A key is for the address that was given.
            .max_redirects(0)
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(SILENCE))
            .timeout_per_write(Some(SILENCE));
        if is_local {
            config = config.proxy(None);
        }
        if let Some(authorities) = access.authorities()? {
            let roots = RootCerts::from(authorities);
            config = config.tls_config(TlsConfig::builder().root_certs(roots).build());
        }
        let authorization = access.authorization()?;
        Ok(Self { agent: config.build().into(), base, authorization })
    }

    /// Where the server is.
    pub fn address(&self) -> &str {
        &self.base
    }

    /// What is at a path.
    pub fn get(&self, path: &str) -> Result<Value, Failure> {
        self.json(self.request(Method::GET, path), ())
    }

    /// The names of the models that may be asked for, the base's first; at least one.
    pub fn models(&self) -> Result<Vec<String>, Failure> {
        let list: List = self.read(&self.get("/v1/models")?)?;
        match list.data.is_empty() {
            true => Err(Failure::Strange(format!("{} has no model", self.base))),
            false => Ok(list.data.into_iter().map(|model| model.id).collect()),
        }
    }

    /// Sends a value to a path, and gives what is answered.
    pub fn post(&self, path: &str, value: &Value) -> Result<Value, Failure> {
        let body = value.to_string();
        let request = self.request(Method::POST, path).header(CONTENT_TYPE, JSON);
        self.json(request, body.as_bytes())
    }

    /// Asks for something to be done that its path says all of.
    pub fn order(&self, path: &str) -> Result<Value, Failure> {
        self.json(self.request(Method::POST, path), &b""[..])
    }

    /// Removes what is at a path.
    pub fn delete(&self, path: &str) -> Result<Value, Failure> {
        self.json(self.request(Method::DELETE, path), ())
    }

    /// The bytes at a path, which are of this kind.
    pub fn download(&self, path: &str, kind: &str) -> Result<impl Read + use<>, Failure> {
        let answer = self.ask(self.request(Method::GET, path), ())?;
        self.reader(answer, kind)
    }

    /// The bytes of the events that follow when a value is sent to a path.
    pub fn stream(&self, path: &str, value: &Value) -> Result<impl Read + Send + use<>, Failure> {
        let kind = "text/event-stream";
        let body = value.to_string();
        let request = self.request(Method::POST, path).header(CONTENT_TYPE, JSON);
        let answer = self.ask(request.header(ACCEPT, kind), body.as_bytes())?;
        self.reader(answer, kind)
    }

    pub(super) fn request(&self, method: Method, path: &str) -> Builder {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        match &self.authorization {
            Some(authorization) => request.header(AUTHORIZATION, authorization),
            None => request,
        }
    }

    /// Asks for a JSON value.
    pub(super) fn json(&self, request: Builder, body: impl AsSendBody) -> Result<Value, Failure> {
        let mut answer = self.ask(request, body)?;
        let (status, kind) = (answer.status().as_u16(), kind_of(&answer));
        let bytes = self.whole(&mut answer)?;
        serde_json::from_slice(&bytes).map_err(|_| Failure::strange(&self.base, status, &kind))
    }

    /// Asks, and gives an answer that isn't an error.
    fn ask(&self, request: Builder, body: impl AsSendBody) -> Result<Response<Body>, Failure> {
        let request = request
            .body(body)
            .map_err(|error| Failure::Strange(format!("cannot ask {}: {error}", self.base)))?;
        let mut answer =
            self.agent.run(request).map_err(|error| Failure::of_connection(&self.base, &error))?;
        let status = answer.status().as_u16();
        if answer.status().is_success() {
            return Ok(answer);
        }
        let retry_after = header(&answer, RETRY_AFTER).parse().ok().map(Duration::from_secs);
        let kind = kind_of(&answer);
        let body = self.whole(&mut answer)?;
        let has_key = self.authorization.is_some();
        Err(Failure::of_answer(&self.base, (status, &kind), retry_after, &body, has_key))
    }

    fn whole(&self, answer: &mut Response<Body>) -> Result<Vec<u8>, Failure> {
        let read = answer.body_mut().with_config().limit(MOST).read_to_vec();
        read.map_err(|error| Failure::of_connection(&self.base, &error))
    }

    fn reader(
        &self,
        answer: Response<Body>,
        kind: &str,
    ) -> Result<impl Read + Send + use<>, Failure> {
        let found = kind_of(&answer);
        match found == kind {
            true => Ok(answer.into_body().into_with_config().limit(u64::MAX).reader()),
            false => Err(Failure::strange(&self.base, answer.status().as_u16(), &found)),
        }
    }

    /// A value as what it is expected to be.
    pub fn read<T: DeserializeOwned>(&self, value: &Value) -> Result<T, Failure> {
        T::deserialize(value).map_err(|error| {
            let error = metal_candle::readable(&error.to_string()).into_owned();
            Failure::Strange(format!("{} answered otherwise than expected: {error}", self.base))
        })
    }
}

fn header(answer: &Response<Body>, name: HeaderName) -> String {
    let value = answer.headers().get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or_default().to_string()
}

/// The content type without its parameters.
fn kind_of(answer: &Response<Body>) -> String {
    let whole = header(answer, CONTENT_TYPE);
    whole.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}
