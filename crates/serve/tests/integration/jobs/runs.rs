//! Runs that are stopped, killed, paused and cancelled.

use super::client::{Client, adapter_bytes, demo, error_of, lines, model, serve, serve_model};
use metal_candle::adapter::Adapter;
use metal_candle::model::{Holding, Model, Quantization};
use metal_candle::random::SplitMix64;
use metal_candle::{DType, Device};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Names the data folder of a server that is to be killed.
const DATA: &str = "SERVE_UNTIL_KILLED";

/// A request for a run of some seconds, with all that decides its bits.
fn long_run(client: &Client) -> Value {
    json!({
        "model": "demo",
        "training_file": client.upload(&lines(120)),
        "validation_file": client.upload(&lines(8)),
        "seed": 3,
        "hyperparameters": {"n_epochs": 4, "batch_size": 4},
    })
}

/// In an order that does not depend on when a checkpoint was complete, which is written beside the steps that follow.
fn sorted(mut told: Vec<(String, Value)>) -> Vec<String> {
    told.sort_by(|a, b| a.0.cmp(&b.0));
    told.into_iter().map(|(message, data)| format!("{message} {data}")).collect()
}

/// The bytes of the adapter of a run that nobody stops, what it tells, and how long it takes.
fn undisturbed() -> (Vec<u8>, Vec<String>, Vec<Value>, Duration) {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(folder.path());
    let client = Client::of(&server);
    let begun = Instant::now();
    let id = client.job(&long_run(&client));
    client.succeeded(&id);
    let taken = begun.elapsed();
    let bytes = adapter_bytes(folder.path(), &id);
    let all = (bytes, sorted(client.told(&id)), client.metrics_of_checkpoints(&id), taken);
    server.stop();
    all
}

/// Starts this very program as a server of a folder; it is asked at the address.
fn serve_apart(data: &Path) -> (Child, Client) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "jobs::runs::serves_until_it_is_killed", "--ignored", "--nocapture"])
        .env(DATA, data)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("listens at ") {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "the server did not start");
    }
    let address = line.trim().rsplit(' ').next().unwrap().to_string();
    // What else it says is for nobody.
    std::thread::spawn(move || output.read_to_end(&mut Vec::new()));
    (child, Client::new(address))
}

#[test]
#[ignore = "is the other side of a test"]
fn serves_until_it_is_killed() {
    let Some(data) = std::env::var_os(DATA) else { return };
    let server = serve(Path::new(&data));
    println!("\nlistens at {}", server.address());
    loop {
        std::thread::park();
    }
}

#[test]
fn a_job_goes_on_bit_for_bit_wherever_its_server_is_killed() {
    let (bytes, told, checkpoints, taken) = undisturbed();
    let mut random = SplitMix64::stream(1, 2);
    for round in 0..2 {
        let folder = tempfile::tempdir().unwrap();
        let (mut child, mut client) = serve_apart(folder.path());
        let id = client.job(&long_run(&client));
        let mut kills = 0;
        while kills < 8 {
            let share = random.next_u64() % 1000;
            std::thread::sleep(taken.mul_f64(share as f64 / 3000.0));
            if client.look(&id)["status"] == "succeeded" {
                break;
            }
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
            (child, client) = serve_apart(folder.path());
        }
        client.succeeded(&id);
        assert_eq!(adapter_bytes(folder.path(), &id), bytes, "round {round}, {kills} kills");
        assert_eq!(sorted(client.told(&id)), told, "round {round}, {kills} kills");
        assert_eq!(client.metrics_of_checkpoints(&id), checkpoints);
        assert!(kills > 1, "the run was over too soon");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn a_job_goes_on_bit_for_bit_after_pauses_and_restarts() {
    let (bytes, told, _, taken) = undisturbed();
    let folder = tempfile::tempdir().unwrap();
    let mut server = serve(folder.path());
    let mut client = Client::of(&server);
    let id = client.job(&long_run(&client));
    let path = |verb: &str| format!("/v1/fine_tuning/jobs/{id}/{verb}");
    for round in 0..3 {
        client.until(&id, |job| job["status"] == "running");
        std::thread::sleep(taken / 8);
        match client.post(&path("pause"), &json!({})) {
            (200, job) => {
                assert_eq!((&job["status"], &job["paused"]), (&json!("queued"), &json!(true)))
            }
            other => panic!("{other:?}"),
        }
        if round == 1 {
            server.stop();
            server = serve(folder.path());
            client = Client::of(&server);
        }
        std::thread::sleep(taken / 8);
        assert_eq!(client.look(&id)["paused"], true);
        assert_eq!(client.post(&path("pause"), &json!({})).0, 400);
        assert_eq!(client.post(&path("resume"), &json!({})).1["paused"], false);
        if round == 2 {
            client.until(&id, |job| job["status"] == "running");
            std::thread::sleep(taken / 8);
            server.stop();
            server = serve(folder.path());
            client = Client::of(&server);
        }
    }
    client.succeeded(&id);
    assert_eq!(adapter_bytes(folder.path(), &id), bytes);
    let figures = |told: Vec<String>| -> Vec<String> {
        told.into_iter().filter(|message| message.starts_with("Step ")).collect()
    };
    assert_eq!(figures(sorted(client.told(&id))), figures(told));
    server.stop();
}

#[test]
fn a_cancelled_job_leaves_its_checkpoints_and_the_next_one_begins() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(folder.path());
    let client = Client::of(&server);
    let request = long_run(&client);
    let (first, second) = (client.job(&request), client.job(&request));
    client.until(&first, |_| !client.all(&first, "checkpoints", 10).is_empty());
    assert_eq!(client.look(&second)["status"], "queued");
    let in_use = request["training_file"].as_str().unwrap();
    assert_eq!(error_of(&client.delete(&format!("/v1/files/{in_use}"))), (400, "id"));
    let (status, job) = client.post(&format!("/v1/fine_tuning/jobs/{first}/cancel"), &json!({}));
    assert_eq!((status, job["status"].as_str()), (200, Some("cancelled")));
    assert!(job["fine_tuned_model"].is_null());
    client.until(&second, |job| job["status"] == "running");
    let checkpoints = client.all(&first, "checkpoints", 10);
    let model = model();
    let run = folder.path().join("jobs").join(&first);
    for checkpoint in &checkpoints {
        let step = checkpoint["step_number"].as_i64().unwrap();
        Adapter::load(&model, run.join(format!("checkpoints/step-{step:08}"))).unwrap();
    }
    let on_disk = fs::read_dir(run.join("checkpoints")).unwrap().count();
    assert_eq!(on_disk, checkpoints.len());
    let name = checkpoints[0]["fine_tuned_model_checkpoint"].as_str().unwrap();
    assert_eq!(client.ok(&format!("/v1/models/{name}"))["id"], name);
    assert_eq!(client.delete(&format!("/v1/models/{name}")).0, 200);
    assert_eq!(client.get(&format!("/v1/models/{name}")).0, 404);
    client.post(&format!("/v1/fine_tuning/jobs/{second}/cancel"), &json!({}));
    server.stop();
}

#[test]
fn a_job_waits_for_a_server_with_the_options_that_it_was_begun_with() {
    let (bytes, ..) = undisturbed();
    let folder = tempfile::tempdir().unwrap();
    let server = serve(folder.path());
    let client = Client::of(&server);
    let id = client.job(&long_run(&client));
    client.until(&id, |_| !client.all(&id, "checkpoints", 10).is_empty());
    server.stop();
    let run = folder.path().join("jobs").join(&id);
    let files = || -> Vec<String> {
        let steps = fs::read_dir(run.join("checkpoints")).unwrap();
        let files = steps.flat_map(|step| fs::read_dir(step.unwrap().path()).unwrap());
        let mut files: Vec<String> =
            files.map(|file| file.unwrap().path().display().to_string()).collect();
        files.sort();
        files
    };
    let resume_if_paused = |client: &Client| {
        if client.look(&id)["paused"] == true {
            assert_eq!(
                client.post(&format!("/v1/fine_tuning/jobs/{id}/resume"), &json!({})).0,
                200
            );
        }
    };
    let whole = files();
    assert!(whole.iter().any(|file| file.ends_with("trainer_state.json")), "{whole:?}");

    let load = |dtype, quantization: Option<Quantization>| {
        let holding = Holding::from(quantization);
        Arc::new(Model::load_with(demo("base"), dtype, &Device::Cpu, holding).unwrap())
    };
    let q8_0: Quantization = "q8_0".parse().unwrap();
    for (dtype, quantization, knows_options, expected) in [
        (DType::BF16, None, true, "dtype is bf16, and was f32 (start it with --dtype f32)"),
        (DType::F32, Some(q8_0), true, "quantize is q8_0, and was none"),
        // As of a job that a server of a former version has begun.
        (DType::BF16, None, false, "trainer_state.json: cannot be resumed: the base model"),
    ] {
        if !knows_options {
            fs::remove_file(run.join("server_options.json")).unwrap();
        }
        let server = serve_model(folder.path(), load(dtype, quantization), |options| {
            options.quantization = quantization;
        });
        let client = Client::of(&server);
        resume_if_paused(&client);
        client.until(&id, |job| job["paused"] == true);
        let newest = client.all(&id, "events", 100).pop().unwrap();
        let told = newest["message"].as_str().unwrap();
        assert!(newest["level"] == "warn" && told.contains(expected), "{newest}");
        assert_eq!(files(), whole);
        server.stop();
    }

    let server = serve(folder.path());
    let client = Client::of(&server);
    assert_eq!(client.look(&id)["paused"], true);
    resume_if_paused(&client);
    client.succeeded(&id);
    assert_eq!(adapter_bytes(folder.path(), &id), bytes);
    server.stop();
}
