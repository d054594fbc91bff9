//! A server of the demo's model, and the commands that ask it.

use crate::common::{Place, send, text};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

fn file(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name).display().to_string()
}

/// A server in the place's folder `server`.
struct Served<'a> {
    place: &'a Place,
    child: Child,
    address: String,
}

impl<'a> Served<'a> {
    fn start(place: &'a Place, further: &[&str]) -> Self {
        Self::start_with(place, further, &[])
    }

    /// One that finds these variables.
    fn start_with(place: &'a Place, further: &[&str], variables: &[(&str, &str)]) -> Self {
        let base = file("demo/base");
        let serve = ["serve", "--model", &base, "--data", "server", "--port", "0"];
        let small = ["--device", "cpu", "--cache-tokens", "8192"];
        let mut command = place.command(&[&serve[..], &small, further].concat());
        command.envs(variables.iter().copied());
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        let mut told = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("is served at ") {
            line.clear();
            assert_ne!(told.read_line(&mut line).unwrap(), 0, "the server doesn't start");
        }
        // It must not meet a closed pipe.
        std::thread::spawn(move || std::io::copy(&mut told, &mut std::io::sink()));
        let address = line.split("is served at ").nth(1).unwrap().split(',').next().unwrap();
        Self { place, child, address: address.into() }
    }

    /// Runs a command that asks this server.
    fn run(&self, key: &str, arguments: &[&str], input: &str) -> Output {
        let mut command = self.place.command(arguments);
        command.env("METAL_CANDLE_SERVER", &self.address).env("METAL_CANDLE_API_KEY", key);
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        // One that has failed reads nothing.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }

    fn ok(&self, key: &str, arguments: &[&str]) -> String {
        let output = self.run(key, arguments, "");
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok("", &[arguments, &["--json"]].concat())).unwrap()
    }

    fn fails(&self, key: &str, arguments: &[&str]) -> String {
        let output = self.run(key, arguments, "");
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        stderr
    }

    fn chat(&self, key: &str, arguments: &[&str], input: &str) -> String {
        let chat = ["chat", "-t", "0", "-n", "8", "--server"];
        let output = self.run(key, &[&chat[..], arguments].concat(), input);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const LIST: &[&str] = &["jobs", "list"];

/// As the README has it, with the demo's model, whose context is as long as texts are by default.
#[test]
fn a_chat_in_which_nothing_is_said_of_lengths_is_answered() {
    let place = Place::new();
    let server = Served::start(&place, &[]);
    let output = server.run("", &["chat", "--server"], "How many legs has a beetle?\n");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!text(&output.stdout).trim().is_empty());
}

/// As a file of variables has it that leaves the key open.
#[cfg(unix)]
#[test]
fn an_empty_key_is_none_and_a_server_that_is_told_to_stop_exits_with_0() {
    let place = Place::new();
    let mut server = Served::start_with(&place, &[], &[("METAL_CANDLE_API_KEY", "")]);
    server.ok("", LIST);
    send(&server.child, libc::SIGTERM);
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
    let stderr = place.fails(2, &["serve", "-m", "x", "--api-key", ""]);
    assert!(stderr.contains("api_key: has no key in it"), "{stderr}");
}

#[test]
fn keys_are_obeyed_as_they_come_and_go() {
    let place = Place::new();
    let add = |name: &str, further: &[&str]| {
        let add = ["keys", "add", name, "--data", "server"];
        place.ok(&[&add[..], further].concat()).trim().to_string()
    };
    let tuner = add("tuner", &["--scope", "fine-tune"]);
    assert!(tuner.starts_with("sk-") && tuner.len() == 51, "{tuner}");
    let server = Served::start(&place, &[]);

    // Made before the server, and while it runs.
    let told = server.fails("", LIST);
    assert!(told.contains("401") && told.contains("METAL_CANDLE_API_KEY"), "{told}");
    server.ok(&tuner, LIST);
    let told = server.fails(&tuner, &["chat", "--server"]);
    assert!(told.contains("403") && told.contains("for fine-tune only"), "{told}");
    let talker = add("talker", &[]);
    assert!(server.fails(&talker, LIST).contains("for chat only"));
    // An answer, and what ends it.
    assert_eq!(server.chat(&talker, &[], "What is 1?\n").lines().count(), 2);
    let boss = add("boss", &["--scope", "admin", "--scope", "chat"]);
    server.ok(&boss, LIST);

    // Limits: none is shared with another key.
    let slow = add("slow", &["--scope", "fine-tune", "--requests-per-minute", "2"]);
    server.ok(&slow, LIST);
    server.ok(&slow, LIST);
    let told = server.fails(&slow, LIST);
    assert!(told.contains("429") && told.contains("slow has asked 2 times"), "{told}");
    let agent: ureq::Agent =
        ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let asked = agent.get(format!("{}/v1/files", server.address));
    let mut refused = asked.header("authorization", format!("Bearer {slow}")).call().unwrap();
    let wait = refused.headers()["retry-after"].to_str().unwrap().parse::<u64>().unwrap();
    assert!(refused.status() == 429 && (1..=60).contains(&wait), "{wait}");
    let error: Value = serde_json::from_str(&refused.body_mut().read_to_string().unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "rate_limit_exceeded");
    assert_eq!(error["error"]["type"], "rate_limit_error");

    let single = add("single", &["--scope", "fine-tune", "--max-requests", "1"]);
    server.ok(&single, LIST);
    let mut half_sent = TcpStream::connect(server.address.trim_start_matches("http://")).unwrap();
    write!(
        half_sent,
        "POST /v1/fine_tuning/jobs HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {single}\r\n\
         content-type: application/json\r\ncontent-length: 99\r\n\r\n{{"
    )
    .unwrap();
    crate::common::wait("a second request is let in", || {
        let output = server.run(&single, LIST, "");
        text(&output.stderr).contains("429")
    });
    drop(half_sent);
    crate::common::wait("the place is not given back", || {
        server.run(&single, LIST, "").status.success()
    });

    let listed = place.json(&["keys", "list", "--json", "--data", "server"]);
    let names: Vec<&str> = listed["keys"]
        .as_array()
        .unwrap()
        .iter()
        .map(|key| key["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["boss", "single", "slow", "talker", "tuner"]);
    assert_eq!(listed["keys"][2]["limits"]["per_minute"], 2);
    assert!(place.ok(&["keys", "list", "--data", "server"]).contains("2 a minute"));

    place.ok(&["keys", "remove", "tuner", "--data", "server"]);
    assert!(server.fails(&tuner, LIST).contains("401"));
    for name in &names[..4] {
        place.ok(&["keys", "remove", name, "--data", "server"]);
    }
    // To remove the last key is not to open the door.
    assert!(server.fails("", LIST).contains("401"));
    for entry in std::fs::read_dir(place.path("server")).unwrap() {
        let path = entry.unwrap().path();
        let bytes = if path.is_file() { std::fs::read(path).unwrap() } else { Vec::new() };
        let is_there = bytes.windows(tuner.len()).any(|part| part == tuner.as_bytes());
        assert!(!is_there, "the key is kept");
    }
}

#[test]
fn what_keys_cannot_be_is_told() {
    let place = Place::new();
    let stderr = place.fails(1, &["keys", "list"]);
    assert!(stderr.contains("no server has kept anything here"), "{stderr}");
    assert!(!place.path("metal-candle-data").exists());
    place.ok(&["keys", "add", "a"]);
    for (arguments, told) in [
        (&["a"][..], "name: there is a key \"a\" already"),
        (&["a b"][..], "name: is \"a b\", expected"),
        (&["b", "--max-requests", "0"][..], "max_requests: is 0, expected"),
        (&["b", "--requests-per-minute", "70000"][..], "requests_per_minute: is 70000, expected"),
        (&["b", "--scope", "all"][..], "invalid value 'all'"),
    ] {
        let stderr = place.fails(2, &[&["keys", "add"][..], arguments].concat());
        assert!(stderr.contains(told), "{stderr}");
    }
    let stderr = place.fails(1, &["keys", "remove", "b"]);
    assert!(stderr.contains("there is no key b"), "{stderr}");
    assert!(place.ok(&["keys", "list"]).starts_with("a  chat; no limits; made "));
}

#[test]
fn a_server_that_others_reach_needs_a_key() {
    let place = Place::new();
    let open = ["serve", "-m", "none/model", "--host", "0.0.0.0", "--data", "server"];
    let stderr = place.fails(2, &open);
    assert!(
        stderr.contains("address: 0.0.0.0:8080 can be") && stderr.contains("--allow-anyone"),
        "{stderr}"
    );
    assert!(!place.path("server").exists());
    place.ok(&["keys", "add", "a", "--data", "server"]);
    // With one it goes on to the model.
    assert!(place.fails(1, &open).contains("none/model"));
}

#[test]
fn a_job_is_started_followed_and_fetched() {
    let place = Place::new();
    let examples = std::fs::read_to_string(file("demo/instructions/train.jsonl")).unwrap();
    let lines = |count: usize| {
        examples.lines().take(count).map(|line| format!("{line}\n")).collect::<String>()
    };
    place.write("train.jsonl", &lines(8));
    place.write("valid.jsonl", &lines(2));
    let server = Served::start(&place, &[]);
    assert!(text(&server.run("", LIST, "").stderr).contains("there are no jobs"));

    let data = ["--training-file", "train.jsonl", "--validation-file", "valid.jsonl"];
    let short = ["--epochs", "2", "--batch-size", "4", "--seed", "7", "--suffix", "mine"];
    let create = [&["jobs", "create", "--metadata", "who=me"][..], &data, &short].concat();
    let output = server.run("", &create, "");
    let told = text(&output.stderr);
    assert!(output.status.success(), "{told}");
    let model = text(&output.stdout).trim().to_string();
    assert!(model.starts_with("ft:base:") && model.contains(":mine:"), "{model}");
    assert!(told.contains("train.jsonl is uploaded as file-"), "{told}");
    assert!(told.contains("Step 4/4: training loss="), "{told}");
    assert!(told.contains(&format!("chat --server {} --model {model}", server.address)), "{told}");

    let list = server.json(LIST);
    assert_eq!((&list["object"], list["data"].as_array().unwrap().len()), (&"list".into(), 1));
    let id = list["data"][0]["id"].as_str().unwrap();
    let shown = server.ok("", &["jobs", "show", id]);
    for part in ["succeeded", &model, "n_epochs 2", "seed             7", "who me"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert_eq!(server.json(&["jobs", "show", id]), list["data"][0]);
    assert_eq!(server.ok("", &["jobs", "watch", id]).trim(), model);
    assert!(server.ok("", LIST).starts_with(id));
    let events = server.ok("", &["jobs", "events", id, "--limit", "100"]);
    let losses = events.lines().filter(|line| line.contains("training loss=")).count();
    assert!((1..=4).contains(&losses), "{events}");
    let checkpoints = server.ok("", &["jobs", "checkpoints", id]);
    assert!(checkpoints.contains("step 4  loss "), "{checkpoints}");

    server.ok("", &["jobs", "download", id, "--output", "adapter"]);
    let inspected = place.json(&["inspect", "adapter", "--json"]);
    assert!(inspected.is_object());
    let stderr = server.run("", &["jobs", "download", id, "--output", "adapter"], "");
    assert_eq!(stderr.status.code(), Some(2), "{}", text(&stderr.stderr));
    let missing = server.fails("", &["jobs", "download", id, "--step", "99"]);
    assert!(missing.contains("404") && !place.path(id).exists(), "{missing}");

    // What it has learned is what the server and this program write by it.
    let asked = "What is 1?\n/reset\nWhat is 1?\n";
    let there = server.chat("", &["--model", &model], asked);
    let base = file("demo/base");
    let chat = ["chat", "-m", &base, "-a", "adapter", "-t", "0", "-n", "8"];
    let local = server.run("", &chat, asked);
    assert_eq!(there, text(&local.stdout));
    let switch = format!("/models\n/model {model}\nWhat is 1?\n");
    let first = there.lines().next().unwrap();
    assert_eq!(server.chat("", &[], &switch).trim_end(), first);
}

#[test]
fn jobs_are_paused_resumed_and_cancelled_and_mistakes_are_told() {
    let place = Place::new();
    let examples = std::fs::read_to_string(file("demo/instructions/train.jsonl")).unwrap();
    place.write("train.jsonl", &examples);
    place.write("bad.jsonl", "{\"messages\": []}\n{\"messages\": 3}\n");
    let server = Served::start(&place, &[]);
    let create = ["jobs", "create", "--training-file"];

    let job = [&create[..], &["train.jsonl", "--epochs", "50", "--detach"]].concat();
    let id = server.ok("", &job);
    let id = id.trim();
    assert_eq!(server.ok("", &["jobs", "pause", id]).trim(), format!("{id} is paused"));
    let output = server.run("", &["jobs", "watch", id], "");
    assert!(output.status.success() && output.stdout.is_empty());
    assert!(text(&output.stderr).contains(&format!("jobs resume {id} lets it go on")));
    server.ok("", &["jobs", "resume", id]);

    // Ctrl-C ends the watching, and not the job.
    let mut command = place.command(&["jobs", "watch", id]);
    command.env("METAL_CANDLE_SERVER", &server.address);
    let mut watching = place.start_as(command, &[]);
    let mut told = BufReader::new(watching.stderr.take().unwrap());
    let mut line = String::new();
    assert_ne!(told.read_line(&mut line).unwrap(), 0);
    send(&watching, libc::SIGINT);
    told.read_to_string(&mut line).unwrap();
    assert_eq!(watching.wait().unwrap().code(), Some(130), "{line}");
    assert!(line.contains("the job goes on"), "{line}");

    assert_eq!(server.ok("", &["jobs", "cancel", id]).trim(), format!("{id} is cancelled"));
    assert!(server.fails("", &["jobs", "watch", id]).contains("has been cancelled"));
    let told = server.fails("", &["jobs", "resume", id]);
    assert!(told.contains("status 400") && told.contains("cannot be resumed"), "{told}");

    let told = server.fails("", &[&create[..], &["bad.jsonl"]].concat());
    assert!(told.contains("has failed: ") && told.contains("line"), "{told}");
    let files = |server: &Served| {
        let asked = ureq::get(format!("{}/v1/files", server.address)).call().unwrap();
        let list = asked.into_body().read_to_string().unwrap();
        serde_json::from_str::<Value>(&list).unwrap()["data"].as_array().unwrap().len()
    };
    let before = files(&server);
    let told = server.fails("", &[&create[..], &["train.jsonl", "--epochs", "99"]].concat());
    assert!(told.contains("n_epochs") && told.contains("99"), "{told}");
    assert!(told.contains("is removed again"), "{told}");
    assert_eq!(files(&server), before, "what was uploaded in vain is removed");
    let told = server.fails("", &["jobs", "show", "ftjob-none"]);
    assert!(told.contains("404") && told.contains("ftjob-none"), "{told}");
    for (arguments, expected) in [
        (&["jobs", "create", "--training-file", "none.jsonl"][..], "training_file: there is no"),
        (
            &[&create[..], &["train.jsonl", "--method", "dpo", "--beta", "NaN"]].concat()[..],
            "beta: is NaN",
        ),
        (
            &[&create[..], &["train.jsonl", "--beta", "0.3"]].concat(),
            "beta: is a hyperparameter of",
        ),
        (&[&create[..], &["train.jsonl", "--epochs", "0"]].concat(), "n_epochs: is 0, expected at"),
        (&["jobs", "show", "a/b"][..], "`a/b` is no id"),
    ] {
        let output = server.run("", arguments, "");
        let stderr = text(&output.stderr);
        assert!(output.status.code() == Some(2) && stderr.contains(expected), "{stderr}");
        assert!(!stderr.contains("uploaded"), "{stderr}");
    }
}

/// Answers whoever connects with this, and leaves the connection open or closes it.
fn answers(answer: &'static str, stays: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut asked = [0; 4096];
            let count = stream.read(&mut asked).unwrap_or(0);
            let lists = asked[..count].starts_with(b"GET /v1/models");
            let models = "HTTP/1.1 200 X\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n\
                           {\"data\": [{\"id\": \"m\"}]}";
            let _ = stream.write_all(if lists && stays { models } else { answer }.as_bytes());
            if stays && !lists {
                open.push(stream);
            }
        }
    });
    address
}

#[test]
fn what_is_no_server_is_told_apart() {
    let place = Place::new();
    let told = |server: &str| place.fails(1, &["jobs", "list", "--server", server]);
    // A port that was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nobody = told(&format!("http://{free}"));
    assert!(nobody.contains("cannot be reached") && nobody.contains("serve` running"), "{nobody}");
    for (answer, expected) in [
        (
            "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>",
            "200 and text/html",
        ),
        (
            "HTTP/1.1 404 X\r\ncontent-type: text/html\r\ncontent-length: 0\r\n\r\n",
            "404 and text/html",
        ),
        (
            "HTTP/1.1 302 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
            "302 and no",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
            "otherwise than",
        ),
        ("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "cannot be reached"),
        ("SSH-2.0-OpenSSH_9.9\r\n", "https:// address, or another program's"),
    ] {
        let address = answers(answer, false);
        let found = told(&format!("http://{address}"));
        assert!(found.contains(expected), "{expected}: {found}");
    }
    for (server, expected) in [("localhost:8080", "expected an address"), ("", "is no address")] {
        let stderr = place.fails(2, &["jobs", "list", "--server", server]);
        assert!(stderr.contains(expected), "{stderr}");
    }
}

#[test]
fn certificates_are_checked() {
    let place = Place::new();
    let tls = |name: &str| file(&format!("tests/integration/tls/{name}"));
    let (certificate, key, authority) = (tls("server.pem"), tls("server.key"), tls("ca.pem"));
    let server = Served::start(&place, &["--tls-certificate", &certificate, "--tls-key", &key]);
    assert!(server.address.starts_with("https://"));
    let told = server.fails("", LIST);
    assert!(told.contains("certificate") && told.contains("--tls-ca"), "{told}");
    server.ok("", &["jobs", "list", "--tls-ca", &authority]);
    let plain = server.address.replace("https", "http");
    let told = server.fails("", &["jobs", "list", "--server", &plain]);
    assert!(told.contains("is it an https:// address"), "{told}");
    let other = answers("HTTP/1.1 400 X\r\ncontent-length: 0\r\n\r\n", false);
    let told = server.fails("", &["jobs", "list", "--server", &format!("https://{other}")]);
    assert!(told.contains("is it an http:// address"), "{told}");
    let output = server.run("", &["jobs", "list", "--tls-ca", &key], "");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("has no certificate"), "{}", text(&output.stderr));
}

#[test]
fn an_answer_that_stands_still_is_stopped() {
    let place = Place::new();
    let address = answers(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n\
          data: {\"choices\": [{\"delta\": {\"content\": \"so far\"}}]}\n\n",
        true,
    );
    let mut command = place.command(&["chat", "--server", &format!("http://{address}")]);
    command.stdin(Stdio::piped());
    let mut child = place.start_as(command, &[]);
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"hi\n/exit\n").unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut said = [0; 6];
    stdout.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"so far");
    std::thread::sleep(Duration::from_millis(20));
    send(&child, libc::SIGINT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn flags_of_a_model_here_are_none_of_a_servers() {
    let place = Place::new();
    for flag in [
        ["--adapter", "a"],
        ["--device", "cpu"],
        ["--chat-template", "x"],
        ["--dtype", "f32"],
        ["--cache-dtype", "mxint8"],
    ] {
        let stderr =
            place.fails(2, &[&["chat", "--server", "http://127.0.0.1:1"][..], &flag].concat());
        assert!(stderr.contains("cannot be used with") && stderr.contains(flag[0]), "{stderr}");
    }
    let stderr = place.fails(2, &["chat", "-m", "x", "--api-key", "sk-a"]);
    assert!(stderr.contains("--server"), "{stderr}");
    let stderr = place.fails(2, &["chat", "--server", "http://127.0.0.1:1", "-t", "nan"]);
    assert!(stderr.contains("temperature: is NaN"), "{stderr}");
}

/// A server of one job, whose events are these lists one after the other as they are asked for; it has ended with the last.
fn server_of_a_job(lists: Vec<Value>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let mut told = 0;
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut asked = String::new();
            while !asked.ends_with("\r\n\r\n") && reader.read_line(&mut asked).unwrap_or(0) > 0 {}
            let is_last = told + 1 >= lists.len();
            let answer = if asked.lines().next().unwrap_or_default().contains("/events") {
                told += 1;
                serde_json::json!({ "data": lists[told.min(lists.len()) - 1], "has_more": false })
            } else {
                serde_json::json!({
                    "id": "ftjob-a", "model": "m", "training_file": "file-a", "created_at": 1,
                    "status": if is_last { "succeeded" } else { "running" },
                    "finished_at": is_last.then_some(2),
                    "fine_tuned_model": is_last.then_some("ft:m"),
                })
            };
            let body = answer.to_string();
            let _ = write!(
                reader.get_mut(),
                "HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
                 connection: close\r\n\r\n{body}",
                body.len()
            );
        }
    });
    address
}

#[test]
fn a_watched_job_whose_server_was_killed_is_told_on_and_not_from_the_beginning() {
    let place = Place::new();
    let event = |id: &str, message: &str, step: u64| serde_json::json!({"id": id, "level": "info", "message": message, "data": {"step": step}});
    let plain = |id: &str, message: &str| serde_json::json!({"id": id, "level": "info", "message": message, "data": {}});
    let (created, saved) =
        (plain("ftevent-a", "Created"), plain("ftevent-c", "Checkpoint created"));
    let one = event("ftevent-b", "Step 1", 1);
    // The newest first. The server was killed after its second step, and has forgotten that.
    let address = server_of_a_job(vec![
        serde_json::json!([event("ftevent-d", "Step 2", 2), saved, one, created]),
        serde_json::json!([saved, one, created]),
        serde_json::json!([
            event("ftevent-f", "Step 3", 3),
            event("ftevent-e", "Step 2", 2),
            saved,
            one,
            created
        ]),
    ]);
    let output = place.run(&["jobs", "watch", "ftjob-a", "--server", &address]);
    let told = text(&output.stderr);
    assert!(output.status.success(), "{told}");
    let count = |part: &str| told.lines().filter(|line| line.contains(part)).count();
    assert_eq!(["Created", "Step 1", "Checkpoint", "Step 2", "Step 3"].map(count), [1, 1, 1, 2, 1]);
    assert!(told.contains("tells again what came after step 1"), "{told}");
    assert_eq!(text(&output.stdout).trim(), "ft:m");
}
