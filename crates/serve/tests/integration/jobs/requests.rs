//! What is refused, and why.

use super::client::{Client, PATIENCE, error_of, lines, serve, serve_with};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

#[test]
fn bad_data_are_refused_with_their_lines() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(folder.path());
    let client = Client::of(&server);
    let good = lines(300);
    let mut bad: Vec<&str> = good.lines().collect();
    bad[1] = "{\"messages\": [}";
    bad[2] = "";
    bad[4] = "[1, 2]";
    bad[299] = "{\"messages\": [{\"role\": \"robot\", \"content\": \"x\"}]}";
    let weights = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 3}]}"#;
    bad[9] = weights;
    let file = client.upload(&bad.join("\n"));
    let (status, report) = client.post(&format!("/v1/files/{file}/check?model=demo"), &json!({}));
    assert_eq!(status, 200, "{report}");
    let found: Vec<i64> = report["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| problem["line"].as_i64().unwrap())
        .collect();
    assert_eq!(found, [2, 5, 10, 300], "{report}");
    assert_eq!(report["records"], 295);
    let (tokens, trained) = (report["tokens"].as_u64().unwrap(), report["trained_tokens"].as_u64());
    assert!(tokens > trained.unwrap() && trained > Some(0));
    let example = report["example"].as_array().unwrap();
    assert!(example.iter().any(|part| part["trained"] == true) && example.len() > 1, "{example:?}");
    let shown: String = example.iter().map(|part| part["text"].as_str().unwrap()).collect();
    assert!(shown.contains("the smaller of 11 and 18"), "{shown}");

    let request = json!({"model": "demo", "training_file": file});
    let id = client.job(&request);
    let job = client.until(&id, |job| job["status"] == "failed");
    let message = job["error"]["message"].as_str().unwrap();
    assert_eq!(job["error"]["param"], "training_file");
    assert!(message.contains("line 2: ") && message.contains("line 300: "), "{message}");
    assert!(!message.contains(folder.path().to_str().unwrap()), "{message}");
    let good = client.upload(&good);
    for (content, expected) in [
        ("\n\n", "is empty"),
        ("PAR1aaaaaaaaaaaaaaaa", "expected JSON Lines"),
        ("\u{1f}\u{8b}\n", "expected JSON Lines"),
        (r#"{"messages": [{"role": "user", "content": "a"}]}"#, "Nothing is learned"),
    ] {
        let request = json!({
            "model": "demo", "training_file": good, "validation_file": client.upload(content),
        });
        let id = client.job(&request);
        let job = client.until(&id, |job| job["status"] == "failed");
        assert_eq!(job["error"]["code"], "invalid_validation_file");
        let message = job["error"]["message"].as_str().unwrap();
        assert!(message.contains(expected), "{message}");
    }
    server.stop();
}

#[test]
fn wrong_requests_are_errors_that_name_their_fields() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(folder.path());
    let client = Client::of(&server);
    let purpose = ("purpose", None, "fine-tune");
    let file = ("file", Some("a.jsonl"), "{}");
    let forms = |fields: &[(&str, Option<&str>, &str)]| {
        let answer = client.form(fields);
        let (status, param) = error_of(&answer);
        (status, param.to_string())
    };
    let bad = |param: &str| (400, param.to_string());
    assert_eq!(forms(&[file]), bad("purpose"));
    assert_eq!(forms(&[purpose]), bad("file"));
    assert_eq!(forms(&[purpose, ("file", None, "{}")]), bad("file"));
    assert_eq!(forms(&[purpose, ("file", Some("a"), "")]), bad("file"));
    assert_eq!(forms(&[purpose, file, file]), bad("file"));
    assert_eq!(forms(&[("purpose", None, "vision"), file]), bad("purpose"));
    assert_eq!(forms(&[("purpose", None, &"x".repeat(5000)), file]), bad("purpose"));
    let expiry = ("expires_after[anchor]", None, "created_at");
    assert_eq!(forms(&[file, purpose, expiry]), bad("expires_after"));
    assert_eq!(forms(&[purpose, ("fiel", None, "")]), bad("fiel"));
    let large = "x".repeat((1 << 20) + 1);
    assert_eq!(forms(&[purpose, ("file", Some("a"), &large)]), (413, "file".to_string()));
    for (content_type, body) in
        [("application/json", "{}"), ("multipart/form-data; boundary=xx", "--xx\r\nbroken")]
    {
        let answer = client.send("/v1/files", content_type, body.as_bytes());
        assert_eq!(error_of(&answer).0, 400, "{}", answer.1);
    }
    assert_eq!(client.ok("/v1/files")["data"], json!([]));
    assert_eq!(fs::read_dir(folder.path().join("files")).unwrap().count(), 0);

    for path in [
        "/v1/files/file-none",
        "/v1/files/..%2F..%2Fserver.sqlite/content",
        "/v1/fine_tuning/jobs/ftjob-none",
        "/v1/fine_tuning/jobs/ftjob-none/events",
        "/v1/fine_tuning/jobs/ftjob-none/adapter",
    ] {
        let answer = client.get(path);
        assert_eq!(error_of(&answer).0, 404, "{path}");
    }
    for (path, param) in [
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?limit=10001", "limit"),
        ("/v1/files?order=up", "order"),
        ("/v1/files?after=file-none", "after"),
        ("/v1/fine_tuning/jobs?limit=x", "limit"),
        ("/v1/fine_tuning/jobs?status=running", "status"),
    ] {
        assert_eq!(error_of(&client.get(path)), (400, param), "{path}");
    }
    let id = client.upload(&lines(4));
    let base = json!({"model": "demo", "training_file": id});
    let mut wrong = BTreeMap::new();
    wrong.insert("training_file", json!({"training_file": "../../etc/passwd"}));
    wrong.insert("validation_file", json!({"validation_file": "file-none"}));
    wrong.insert("suffix", json!({"suffix": "../x"}));
    wrong.insert("integrations", json!({"integrations": [{"type": "wandb"}]}));
    wrong.insert("method.type", json!({"method": {"type": "reinforcement"}}));
    for (param, fields) in wrong {
        let mut request = base.clone();
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = client.post("/v1/fine_tuning/jobs", &request);
        assert_eq!(error_of(&answer), (400, param), "{}", answer.1);
    }
    let answer = client.post("/v1/fine_tuning/jobs/ftjob-none/cancel", &json!({"reason": "x"}));
    assert_eq!(error_of(&answer).0, 400, "{}", answer.1);
    let answer =
        client.post("/v1/fine_tuning/jobs", &json!({"model": "gpt-4o", "training_file": id}));
    assert_eq!(error_of(&answer), (404, "model"));
    assert_eq!(client.ok("/v1/fine_tuning/jobs")["data"], json!([]));
    server.stop();
}

#[test]
fn adapters_of_others_are_no_beginning_and_none_hides_the_base() {
    let (folder, adapters) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for name in ["demo", "other"] {
        fs::create_dir(adapters.path().join(name)).unwrap();
        fs::write(adapters.path().join(name).join("adapter_config.json"), "{}").unwrap();
    }
    let server = serve_with(folder.path(), |it| it.adapters = Some(adapters.path().into()));
    let client = Client::of(&server);
    let models = client.ok("/v1/models");
    let names = models["data"].as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap());
    assert_eq!(names.collect::<Vec<_>>(), ["demo", "other"]);
    let job = json!({"model": "other", "training_file": client.upload(&lines(4))});
    let answer = client.post("/v1/fine_tuning/jobs", &job);
    assert_eq!(error_of(&answer), (400, "model"));
    assert!(answer.1["error"]["message"].as_str().unwrap().contains("was not fine-tuned here"));
    server.stop();
}

#[test]
fn half_sent_uploads_hold_nobody_up_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(folder.path());
    let client = Client::of(&server);
    let head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\
                Content-Type: multipart/form-data; boundary=xx\r\n\r\n\
                --xx\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nhalf";
    let uploads: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            stream.write_all(head.as_bytes()).unwrap();
            stream
        })
        .collect();
    let begun = Instant::now();
    let files = || fs::read_dir(folder.path().join("files")).unwrap().count();
    while files() < uploads.len() {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(client.ok("/v1/files")["data"], json!([]));
    let id = client.upload("{}");
    assert_eq!(client.bytes(&format!("/v1/files/{id}/content")), (200, b"{}".to_vec()));
    drop(uploads);
    while files() > 1 {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(20));
    }
    server.stop();
}
