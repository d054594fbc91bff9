//! A server of the demo's model, and what it is asked.

use candle_core::Tensor;
use metal_candle::generate::GenerateOptions;
use metal_candle::model::Model;
use metal_candle::text::Tokenizer;
use metal_candle::{DType, Device};
use metal_candle_serve::{Base, Options, Server};
use serde_json::{Map, Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex};

/// The tokens of a prompt and its text.
pub const CONTEXT: usize = 2048;

/// A server, for as long as this is there.
pub struct Running {
    address: SocketAddr,
    _server: Mutex<Server>,
    _data: tempfile::TempDir,
}

/// With the demo's template, which knows nothing of tools.
static SERVER: LazyLock<Running> = LazyLock::new(|| Running::start(None, &[]));

/// With a template that knows of tools and thoughts.
static THINKER: LazyLock<Running> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/templates/qwen-tools.jinja");
    Running::start(Some(&std::fs::read_to_string(path).unwrap()), &[])
});

impl Running {
    /// With this chat template in place of the demo's, and these special tokens beside the demo's.
    pub fn start(template: Option<&str>, special: &[&str]) -> Self {
        Self::start_with(template, special, |_| {})
    }

    /// As [`Self::start`], with options that are changed.
    pub fn start_with(
        template: Option<&str>,
        special: &[&str],
        change: impl FnOnce(&mut Options),
    ) -> Self {
        let data = tempfile::tempdir().unwrap();
        let folder = base(data.path());
        add_special_tokens(&folder, special);
        let mut options = Options::new("demo", data.path().join("data"));
        options.address = SocketAddr::from(([127, 0, 0, 1], 0));
        options.engine.cache_tokens = Some(16 * 1024);
        change(&mut options);
        let mut tokenizer = Tokenizer::load(&folder).unwrap();
        if let Some(template) = template {
            tokenizer.set_chat_template(template).unwrap();
        }
        let base = Base {
            model: Arc::new(Model::load(&folder, DType::F32, &Device::Cpu).unwrap()),
            replicas: Vec::new(),
            tokenizer,
            folder,
            variables: Map::new(),
            defaults: GenerateOptions::default(),
        };
        let server = Server::start(base, options).unwrap();
        Self { address: server.address(), _server: Mutex::new(server), _data: data }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What its answer is: its status and its body.
    pub fn ask(&self, path: &str, body: &Value) -> (u16, String) {
        ask_at(self.address, path, body)
    }

    /// As [`Self::ask`], with `GET`.
    pub fn get(&self, path: &str) -> (u16, String) {
        let head = "HTTP/1.1\r\nhost: localhost\r\nconnection: close";
        send_to(self.address, &format!("GET {path} {head}\r\n\r\n"))
    }

    /// What it answers, which has to be good.
    pub fn good(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.ask(path, body);
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap()
    }

    /// The events of a stream, which has to end as streams do.
    pub fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let (status, answer) = ask_at(self.address, path, &body);
        assert_eq!(status, 200, "{answer}");
        let mut events: Vec<&str> = answer.split("\n\n").filter(|it| !it.is_empty()).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"));
        let data = |event: &&str| event.strip_prefix("data: ").map(str::to_string);
        events.iter().filter_map(data).map(|it| serde_json::from_str(&it).unwrap()).collect()
    }
}

/// The demo's model with a longer context.
fn base(place: &Path) -> PathBuf {
    let folder = place.join("base");
    std::fs::create_dir(&folder).unwrap();
    let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../cli/demo/base"));
    for entry in demo.read_dir().unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let config = std::fs::read(demo.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["max_position_embeddings"] = json!(CONTEXT);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder
}

/// Adds tokens to a model's tokenizer, and a row of zeros for each to its embedding.
fn add_special_tokens(folder: &Path, special: &[&str]) {
    if special.is_empty() {
        return;
    }
    let edit = |name: &str, change: &dyn Fn(&mut Value)| {
        let path = folder.join(name);
        let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut value);
        std::fs::write(path, value.to_string()).unwrap();
    };
    let path = folder.join("model.safetensors");
    let mut weights = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let table = weights.remove("model.embed_tokens.weight").unwrap();
    let (first, width) = table.dims2().unwrap();
    let rows = Tensor::zeros((special.len(), width), table.dtype(), &Device::Cpu).unwrap();
    let table = Tensor::cat(&[&table, &rows], 0).unwrap();
    weights.insert("model.embed_tokens.weight".into(), table);
    candle_core::safetensors::save(&weights, path).unwrap();
    edit("config.json", &|config| config["vocab_size"] = json!(first + special.len()));
    edit("tokenizer.json", &|tokenizer| {
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        for (index, text) in special.iter().enumerate() {
            added.push(json!({"id": first + index, "content": text, "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}));
        }
    });
}

/// What an answer is: its status and its body.
pub fn ask(path: &str, body: &Value) -> (u16, String) {
    ask_at(SERVER.address, path, body)
}

/// As [`ask`], of the model that thinks and calls tools.
pub fn ask_thinker(path: &str, body: &Value) -> (u16, String) {
    ask_at(THINKER.address, path, body)
}

fn ask_at(address: SocketAddr, path: &str, body: &Value) -> (u16, String) {
    send_to(address, &post(path, body))
}

/// Asks for a stream and reads its beginning. Dropping what this gives leaves it.
pub fn begin(address: SocketAddr, path: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(post(path, body).as_bytes()).unwrap();
    stream.read_exact(&mut [0; 500]).unwrap();
    stream
}

fn post(path: &str, body: &Value) -> String {
    let body = body.to_string();
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
}

/// What the answer to a request as it is sent is.
pub fn send(request: &str) -> (u16, String) {
    send_to(SERVER.address, request)
}

/// As [`send`], to another server.
pub fn send_to(address: SocketAddr, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    if !head.to_lowercase().contains("transfer-encoding: chunked") {
        return (status, body.to_string());
    }
    let (mut whole, mut rest) = (String::new(), body);
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        whole.push_str(&after[..size]);
        rest = after[size..].trim_start_matches("\r\n");
    }
    (status, whole)
}

pub fn good(path: &str, body: &Value) -> Value {
    SERVER.good(path, body)
}

/// The field that an error is about.
pub fn refused(path: &str, body: &Value) -> Value {
    let (status, answer) = ask(path, body);
    assert_eq!(status, 400, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert!(answer["error"]["message"].is_string() && answer["error"]["type"].is_string());
    answer["error"]["param"].clone()
}

/// The events of a stream, which has to end as streams do.
pub fn events(path: &str, body: &Value) -> Vec<Value> {
    SERVER.events(path, body)
}

/// Where the server listens.
pub fn address() -> SocketAddr {
    SERVER.address
}
