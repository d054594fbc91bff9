//! A server of the demo's model, and one who asks it.

use metal_candle::generate::GenerateOptions;
use metal_candle::model::Model;
use metal_candle::text::Tokenizer;
use metal_candle::{DType, Device};
use metal_candle_serve::{Base, Options, Server};
use serde_json::{Map, Value};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use ureq::Agent;

pub const PATIENCE: Duration = Duration::from_secs(300);

pub fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo").join(name)
}

pub fn model() -> Model {
    Model::load(demo("base"), DType::F32, &Device::Cpu).unwrap()
}

pub fn serve(data: &Path) -> Server {
    serve_with(data, |_| {})
}

/// As [`serve`], with other options.
pub fn serve_with(data: &Path, change: impl FnOnce(&mut Options)) -> Server {
    serve_replicas(data, 1, change)
}

/// As [`serve_with`], with so many engines, each with a model of its own.
pub fn serve_replicas(data: &Path, count: usize, change: impl FnOnce(&mut Options)) -> Server {
    let others = (1..count).map(|_| Arc::new(model())).collect();
    serve_models(data, Arc::new(model()), others, change)
}

/// As [`serve_with`], with this model.
pub fn serve_model(data: &Path, model: Arc<Model>, change: impl FnOnce(&mut Options)) -> Server {
    serve_models(data, model, Vec::new(), change)
}

fn serve_models(
    data: &Path,
    model: Arc<Model>,
    replicas: Vec<Arc<Model>>,
    change: impl FnOnce(&mut Options),
) -> Server {
    let base = Base {
        model,
        replicas,
        tokenizer: Tokenizer::load(&demo("base")).unwrap(),
        folder: demo("base"),
        variables: Map::new(),
        defaults: GenerateOptions::default(),
    };
    let mut options = Options::new("demo", data);
    options.address = "127.0.0.1:0".parse().unwrap();
    options.max_file = 1 << 20;
    change(&mut options);
    Server::start(base, options).unwrap()
}

/// Lines of the demo's training data.
pub fn lines(count: usize) -> String {
    let text = fs::read_to_string(demo("instructions/train.jsonl")).unwrap();
    text.lines().take(count).map(|line| format!("{line}\n")).collect()
}

pub struct Client {
    agent: Agent,
    base: String,
}

impl Client {
    pub fn new(address: impl std::fmt::Display) -> Self {
        let agent = Agent::config_builder().http_status_as_error(false).build().into();
        Self { agent, base: format!("http://{address}") }
    }

    pub fn of(server: &Server) -> Self {
        Self::new(server.address())
    }

    pub fn bytes(&self, path: &str) -> (u16, Vec<u8>) {
        let mut answer = self.agent.get(format!("{}{path}", self.base)).call().unwrap();
        (answer.status().as_u16(), answer.body_mut().read_to_vec().unwrap())
    }

    /// Asks for a file, reads its beginning and leaves.
    pub fn begin(&self, path: &str) {
        let mut answer = self.agent.get(format!("{}{path}", self.base)).call().unwrap();
        assert_eq!(answer.status().as_u16(), 200);
        answer.body_mut().as_reader().read_exact(&mut [0; 100]).unwrap();
    }

    pub fn get(&self, path: &str) -> (u16, Value) {
        let (status, bytes) = self.bytes(path);
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    pub fn ok(&self, path: &str) -> Value {
        let (status, value) = self.get(path);
        assert_eq!(status, 200, "{path}: {value}");
        value
    }

    pub fn delete(&self, path: &str) -> (u16, Value) {
        let mut answer = self.agent.delete(format!("{}{path}", self.base)).call().unwrap();
        let text = answer.body_mut().read_to_string().unwrap();
        (answer.status().as_u16(), serde_json::from_str(&text).unwrap())
    }

    pub fn send(&self, path: &str, content_type: &str, body: &[u8]) -> (u16, Value) {
        let request = self.agent.post(format!("{}{path}", self.base)).content_type(content_type);
        let mut answer = request.send(body).unwrap();
        let text = answer.body_mut().read_to_string().unwrap();
        (answer.status().as_u16(), serde_json::from_str(&text).unwrap())
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.send(path, "application/json", body.to_string().as_bytes())
    }

    /// The status of an answer that need not be JSON.
    pub fn status(&self, path: &str, body: &Value) -> u16 {
        let request = self.agent.post(format!("{}{path}", self.base));
        let request = request.content_type("application/json");
        request.send(body.to_string().as_bytes()).unwrap().status().as_u16()
    }

    /// A form of fields, of which one with a file name is a file.
    pub fn form(&self, fields: &[(&str, Option<&str>, &str)]) -> (u16, Value) {
        let mut body = String::new();
        for (name, file, content) in fields {
            let file = file.map_or(String::new(), |file| format!("; filename=\"{file}\""));
            body.push_str(&format!(
                "--xx\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n{content}\r\n"
            ));
        }
        body.push_str("--xx--\r\n");
        self.send("/v1/files", "multipart/form-data; boundary=xx", body.as_bytes())
    }

    pub fn upload(&self, content: &str) -> String {
        let fields = [("purpose", None, "fine-tune"), ("file", Some("data.jsonl"), content)];
        let (status, file) = self.form(&fields);
        assert_eq!(status, 200, "{file}");
        file["id"].as_str().unwrap().to_string()
    }

    pub fn job(&self, request: &Value) -> String {
        let (status, job) = self.post("/v1/fine_tuning/jobs", request);
        assert_eq!(status, 200, "{job}");
        job["id"].as_str().unwrap().to_string()
    }

    pub fn look(&self, job: &str) -> Value {
        self.ok(&format!("/v1/fine_tuning/jobs/{job}"))
    }

    /// Waits until a job is as wanted.
    pub fn until(&self, job: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let found = self.look(job);
            if wanted(&found) {
                return found;
            }
            let ended = ["succeeded", "failed", "cancelled"];
            let has_ended = found["status"].as_str().is_some_and(|status| ended.contains(&status));
            assert!(!has_ended && begun.elapsed() < PATIENCE, "{found}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn succeeded(&self, job: &str) -> Value {
        self.until(job, |job| job["status"] == "succeeded")
    }

    /// Everything of a job under `path`, the oldest first, over pages of this size.
    pub fn all(&self, job: &str, path: &str, page: usize) -> Vec<Value> {
        let mut found: Vec<Value> = Vec::new();
        loop {
            let after = match found.last() {
                Some(last) => format!("&after={}", last["id"].as_str().unwrap()),
                None => String::new(),
            };
            let list = self.ok(&format!("/v1/fine_tuning/jobs/{job}/{path}?limit={page}{after}"));
            found.extend(list["data"].as_array().unwrap().iter().cloned());
            if list["has_more"] == false {
                found.reverse();
                return found;
            }
        }
    }

    /// What a job has told, without what differs from run to run.
    pub fn told(&self, job: &str) -> Vec<(String, Value)> {
        let events = self.all(job, "events", 100).into_iter();
        let told = events.map(|mut event| {
            if let Some(data) = event["data"].as_object_mut() {
                data.remove("tokens_per_second");
            }
            (event["message"].as_str().unwrap().replace(job, "JOB"), event["data"].take())
        });
        // Names of files differ.
        told.filter(|(message, _)| !message.contains(": f")).collect()
    }

    pub fn metrics_of_checkpoints(&self, job: &str) -> Vec<Value> {
        let checkpoints = self.all(job, "checkpoints", 3);
        checkpoints.into_iter().map(|mut checkpoint| checkpoint["metrics"].take()).collect()
    }
}

pub fn adapter_bytes(data: &Path, job: &str) -> Vec<u8> {
    fs::read(data.join("jobs").join(job).join("adapter_model.safetensors")).unwrap()
}

pub fn error_of(answer: &(u16, Value)) -> (u16, &str) {
    let error = &answer.1["error"];
    for key in ["message", "type"] {
        assert!(error[key].is_string(), "{}", answer.1);
    }
    (answer.0, error["param"].as_str().unwrap_or_default())
}
