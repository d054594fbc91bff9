//! Adapters by the names that they have on a hub.

use crate::jobs::client::{Client, PATIENCE, error_of, model, serve, serve_with};
use metal_candle::adapter::{ADAPTER_CONFIG, Adapter, LoraConfig};
use metal_candle::hub::HubOptions;
use metal_candle_serve::HubAdapters;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const CHAT: &str = "/v1/chat/completions";
const WEIGHTS: &str = "adapter_model.safetensors";

type Files = BTreeMap<String, Vec<u8>>;

/// A hub on this machine.
struct Hub {
    endpoint: String,
    shared: Arc<Shared>,
}

struct Shared {
    /// By their ids.
    repositories: BTreeMap<String, Files>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    requests: Vec<String>,
    /// Whose weights are held back.
    held: Option<String>,
}

impl Hub {
    fn new(repositories: BTreeMap<String, Files>) -> Self {
        let (state, changed) = Default::default();
        let shared = Arc::new(Shared { repositories, state, changed });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let answering = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, shared) = (stream.unwrap(), answering.clone());
                // Who goes away early is none of the hub's business.
                std::thread::spawn(move || answer(stream, &shared));
            }
        });
        Self { endpoint, shared }
    }

    fn hold(&self, id: Option<&str>) {
        self.shared.state.lock().unwrap().held = id.map(str::to_string);
        self.shared.changed.notify_all();
    }

    fn requests(&self) -> Vec<String> {
        self.shared.state.lock().unwrap().requests.clone()
    }

    fn options(&self, cache: PathBuf, max_bytes: u64) -> HubAdapters {
        HubAdapters { max_bytes, ..options_of(&self.endpoint, cache) }
    }
}

fn options_of(endpoint: &str, cache: PathBuf) -> HubAdapters {
    HubAdapters::new(HubOptions {
        cache,
        token: None,
        endpoint: endpoint.to_string(),
        offline: false,
        timeout: Duration::from_secs(600),
        list_attempts: 5,
    })
}

fn answer(mut stream: TcpStream, hub: &Shared) -> io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap()?;
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    hub.state.lock().unwrap().requests.push(first.clone());
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let (status, headers, body) = match found(hub, path) {
        Some((headers, body)) => (200, headers, body),
        None => (404, String::new(), Vec::new()),
    };
    if method == "GET" {
        let is_held = |state: &mut State| {
            let held = |id: &String| path.ends_with(WEIGHTS) && path.contains(id.as_str());
            state.held.as_ref().is_some_and(held)
        };
        drop(hub.changed.wait_while(hub.state.lock().unwrap(), is_held).unwrap());
    }
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n"
    )?;
    if method == "GET" { stream.write_all(&body) } else { Ok(()) }
}

/// What stands at a path, and its headers.
fn found(hub: &Shared, path: &str) -> Option<(String, Vec<u8>)> {
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    if let ["api", "models", owner, name, "revision", _] = parts[..] {
        let files = hub.repositories.get(&format!("{owner}/{name}"))?;
        let siblings: Vec<Value> = files.keys().map(|name| json!({"rfilename": name})).collect();
        let listing = json!({"sha": COMMIT, "siblings": siblings});
        return Some((String::new(), listing.to_string().into_bytes()));
    }
    let [owner, name, "resolve", _, file] = parts[..] else { return None };
    let body = hub.repositories.get(&format!("{owner}/{name}"))?.get(file)?.clone();
    let tag = file.replace('.', "-");
    Some((format!("X-Repo-Commit: {COMMIT}\r\nETag: \"{tag}\"\r\n"), body))
}

/// The files of a folder.
fn files(folder: &Path) -> Files {
    let entries = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let named = |path: PathBuf| {
        (path.file_name().unwrap().to_str().unwrap().to_string(), std::fs::read(&path).unwrap())
    };
    entries.filter(|path| path.is_file()).map(named).collect()
}

/// An adapter of the demo's model.
fn adapter() -> Files {
    let (folder, model) = (tempfile::tempdir().unwrap(), model());
    Adapter::new(&model, &LoraConfig::default(), 1).unwrap().save(folder.path(), "demo").unwrap();
    files(folder.path())
}

fn ask(client: &Client, model: &str) -> (u16, Value) {
    let messages = json!([{"role": "user", "content": "What is 1 and 1?"}]);
    client.post(CHAT, &json!({"model": model, "messages": messages, "max_tokens": 1}))
}

#[test]
fn an_adapter_of_the_hub_is_downloaded_once_and_nobody_else_waits_for_it() {
    let good = adapter();
    let hub = Hub::new(BTreeMap::from([
        ("owner/good".to_string(), good.clone()),
        ("slow/good".to_string(), good),
    ]));
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("hub");
    let serve_hub = |offline: bool| {
        serve_with(folder.path(), |options| {
            let mut adapters = hub.options(cache.clone(), 64 << 20);
            adapters.hub.offline = offline;
            options.hub_adapters = Some(adapters);
        })
    };
    let server = serve_hub(false);
    let client = Client::of(&server);
    hub.hold(Some("slow/good"));
    let waiting: Vec<_> = (0..20)
        .map(|_| {
            let client = Client::of(&server);
            std::thread::spawn(move || ask(&client, "slow/good"))
        })
        .collect();
    let weights = |id: &str| {
        let wanted = format!("GET /{id}/resolve/{COMMIT}/{WEIGHTS} ");
        hub.requests().iter().filter(|request| request.starts_with(&wanted)).count()
    };
    let begun = Instant::now();
    while weights("slow/good") == 0 {
        assert!(begun.elapsed() < PATIENCE, "nobody asked the hub");
        std::thread::sleep(Duration::from_millis(5));
    }
    for name in ["owner/good", "owner/good@v2", "demo"] {
        let (status, answer) = ask(&client, name);
        assert_eq!((status, answer["model"].as_str()), (200, Some(name)), "{answer}");
    }
    assert!(waiting.iter().all(|thread| !thread.is_finished()));
    hub.hold(None);
    for thread in waiting {
        let (status, answer) = thread.join().unwrap();
        assert_eq!(status, 200, "{answer}");
    }
    assert_eq!(weights("slow/good"), 1);
    let asked = hub.requests().len();
    assert_eq!(ask(&client, "slow/good").0, 200);
    assert_eq!(hub.requests().len(), asked, "what is here isn't asked for");
    assert_eq!(client.ok("/v1/models/slow/good")["parent"], "demo");
    assert_eq!(client.status("/v1/unload_lora_adapter", &json!({"lora_name": "slow/good"})), 200);
    assert_eq!(client.get("/v1/models/slow/good").0, 404);
    server.stop();

    let server = serve_hub(true);
    let client = Client::of(&server);
    assert_eq!(ask(&client, "slow/good").0, 200, "it was kept");
    let (status, answer) = ask(&client, "slow/other");
    assert_eq!((status, answer["error"]["param"].as_str()), (503, Some("model")), "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("HF_HUB_OFFLINE"), "{answer}");
    assert!(!answer.to_string().contains(folder.path().to_str().unwrap()), "{answer}");
    server.stop();
}

#[test]
fn a_hub_that_cannot_be_reached_is_said_at_once() {
    let endpoint = {
        // Nobody listens there any more.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let folder = tempfile::tempdir().unwrap();
    let options = options_of(&endpoint, folder.path().join("hub"));
    let server = serve_with(folder.path(), |it| it.hub_adapters = Some(options));
    let begun = Instant::now();
    let answer = ask(&Client::of(&server), "owner/good");
    assert_eq!(error_of(&answer), (503, "model"), "{}", answer.1);
    // Before it is asked a second time, 10 s would pass.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    server.stop();
}

#[test]
fn an_adapter_that_takes_long_to_read_is_read_of_the_servers_folder_alone() {
    let started = |from: &str| {
        let mut files = adapter();
        let mut config: Value = serde_json::from_slice(&files[ADAPTER_CONFIG]).unwrap();
        config["init_lora_weights"] = from.into();
        files.insert(ADAPTER_CONFIG.to_string(), config.to_string().into_bytes());
        files
    };
    let named = ["pissa", "olora"].map(|from| (format!("owner/{from}"), started(from)));
    let hub = Hub::new(BTreeMap::from(named));
    let folder = tempfile::tempdir().unwrap();
    let watched = folder.path().join("adapters");
    std::fs::create_dir_all(watched.join("olora")).unwrap();
    for (name, content) in started("olora") {
        std::fs::write(watched.join("olora").join(name), content).unwrap();
    }
    let server = serve_with(folder.path(), |options| {
        options.hub_adapters = Some(hub.options(folder.path().join("hub"), 64 << 20));
        options.adapters = Some(watched.clone());
    });
    let client = Client::of(&server);
    for name in ["owner/pissa", "owner/olora"] {
        let answer = ask(&client, name);
        assert_eq!(error_of(&answer), (400, "model"), "{}", answer.1);
        let message = answer.1["error"]["message"].as_str().unwrap();
        assert!(message.contains(name) && message.contains("convert --to mlx"), "{message}");
        assert_eq!(client.get(&format!("/v1/models/{name}")).0, 404);
    }
    let (status, answer) = ask(&client, "olora");
    assert_eq!(status, 200, "{answer}");
    server.stop();
}

#[test]
fn what_the_hub_has_no_adapter_of_this_base_for_is_said() {
    let good = adapter();
    let most: usize = good.values().map(Vec::len).sum();
    let mut large = good.clone();
    large.get_mut(WEIGHTS).unwrap().push(0);
    let whole = Files::from([("config.json".to_string(), b"{}".to_vec())]);
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/llama/adapter");
    let other = files(Path::new(fixture));
    let repositories = [("good", good), ("large", large), ("whole", whole), ("other", other)];
    let named = repositories.map(|(name, files)| (format!("owner/{name}"), files));
    let hub = Hub::new(BTreeMap::from(named));
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("hub");
    let options = hub.options(cache.clone(), most as u64);
    let server = serve_with(folder.path(), |it| it.hub_adapters = Some(options));
    let client = Client::of(&server);
    for (name, status, words) in [
        ("owner/none", 404, "there is no adapter of this id"),
        ("owner/whole", 400, "holds no adapter"),
        ("owner/large", 400, "expected at most"),
        ("owner/other", 400, "another base model"),
        ("../owner/good", 404, "does not exist"),
        ("owner/good@../x", 404, "does not exist"),
        ("none", 404, "does not exist"),
    ] {
        let answer = ask(&client, name);
        assert_eq!(error_of(&answer), (status, "model"), "{}", answer.1);
        let message = answer.1["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{message}");
        assert!(!message.contains(folder.path().to_str().unwrap()), "{message}");
    }
    assert_eq!(ask(&client, "owner/good").0, 200);
    let models = client.ok("/v1/models");
    let ids: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["demo", "owner/good"]);
    server.stop();

    let asked = hub.requests().len();
    let other = tempfile::tempdir().unwrap();
    let server = serve(other.path());
    assert_eq!(error_of(&ask(&Client::of(&server), "owner/good")), (404, "model"));
    assert_eq!(hub.requests().len(), asked, "nothing is asked of the hub unless it is allowed");
    server.stop();
}
