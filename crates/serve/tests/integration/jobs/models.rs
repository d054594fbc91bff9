//! The models that jobs make.

use super::client::{Client, PATIENCE, adapter_bytes, demo, error_of, lines, model, serve};
use metal_candle::DType;
use metal_candle::adapter::Adapter;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

#[test]
fn a_job_makes_a_model_and_tells_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(folder.path());
    let client = Client::of(&server);
    let (training, validation) = (client.upload(&lines(40)), client.upload(&lines(8)));
    let asked = json!({
        "model": "demo", "training_file": training, "validation_file": validation, "suffix": "My first",
        "seed": 7, "metadata": {"team": "a"},
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
    });
    let (_, created) = client.post("/v1/fine_tuning/jobs", &asked);
    assert_eq!(created["status"], "validating_files");
    assert_eq!(created["hyperparameters"]["batch_size"], "auto");
    let id = created["id"].as_str().unwrap();
    let job = client.succeeded(id);
    let letters = id.strip_prefix("ftjob-").unwrap().get(..8).unwrap();
    let name = format!("ft:demo:metal-candle:my-first:{letters}");
    assert_eq!(job["fine_tuned_model"], name.as_str());
    let chosen = json!({"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 1.0});
    assert_eq!(job["hyperparameters"], chosen);
    assert_eq!(job["method"]["supervised"]["hyperparameters"], chosen);
    for key in ["finished_at", "trained_tokens", "seed"] {
        assert!(job[key].is_i64(), "{key}: {job}");
    }
    assert_eq!(
        (&job["error"], &job["estimated_finish"], &job["metadata"]["team"]),
        (&Value::Null, &Value::Null, &json!("a"))
    );

    let messages: Vec<String> = client.told(id).into_iter().map(|(message, _)| message).collect();
    assert_eq!(messages.first().unwrap(), "Created fine-tuning job: JOB");
    assert_eq!(
        messages[1..3],
        ["Files validated, moving job to queued state", "Fine-tuning job started"]
    );
    assert!(messages.iter().any(|message| message.starts_with("Step 20/20: training loss=")));
    assert!(messages.iter().any(|message| message.starts_with("Step 20/20: validation loss=")));
    assert_eq!(messages.last().unwrap(), "The job has successfully completed");

    // The base was read for all jobs, before the run took its turn on the device.
    let of_base = |folder: &Path| fs::read(folder.join("base_files.json")).unwrap();
    assert_eq!(of_base(folder.path()), of_base(&folder.path().join("jobs").join(id)));

    let samples: Vec<Value> = client
        .all(id, "events", 100)
        .into_iter()
        .filter(|it| it["data"]["text"].is_string())
        .collect();
    assert_eq!(samples.len(), 30, "3 at each checkpoint");
    assert!(samples.iter().all(|it| it["type"] == "message" && it["data"]["prompt"].is_string()));
    let asked = client.bytes(&format!("/v1/files/{validation}/content")).1;
    let first = String::from_utf8(asked).unwrap().lines().next().unwrap().to_string();
    let first: Value = serde_json::from_str(&first).unwrap();
    let messages_of_first = first["messages"].as_array().unwrap();
    assert_eq!(
        samples[0]["data"]["prompt"],
        messages_of_first[messages_of_first.len() - 2]["content"]
    );
    assert_eq!(samples[0]["data"]["step"], 2);
    let prompt = &samples[27]["data"]["prompt"];
    let chat = json!({"model": name, "messages": [{"role": "user", "content": prompt}], "temperature": 0,
        "max_tokens": 64});
    let (_, answer) = client.post("/v1/chat/completions", &chat);
    assert_eq!(samples[27]["data"]["text"], answer["choices"][0]["message"]["content"]);

    let checkpoints = client.all(id, "checkpoints", 3);
    let steps: Vec<i64> =
        checkpoints.iter().map(|checkpoint| checkpoint["step_number"].as_i64().unwrap()).collect();
    assert_eq!(steps, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]);
    let last = checkpoints.last().unwrap();
    assert_eq!(last["fine_tuned_model_checkpoint"], format!("{name}:ckpt-step-20"));
    for key in ["train_loss", "valid_loss", "valid_mean_token_accuracy", "full_valid_loss"] {
        assert!(last["metrics"][key].is_f64(), "{key}: {last}");
    }

    let file = job["result_files"][0].as_str().unwrap();
    assert_eq!(client.ok(&format!("/v1/files/{file}"))["purpose"], "fine-tune-results");
    let (_, csv) = client.bytes(&format!("/v1/files/{file}/content"));
    let csv = String::from_utf8(csv).unwrap();
    assert_eq!(csv.lines().count(), 21, "{csv}");
    assert!(
        csv.starts_with("step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n1,")
    );

    let models = client.ok("/v1/models");
    let named = |name: &str| models["data"].as_array().unwrap().iter().any(|it| it["id"] == name);
    assert!(named(&name) && named(&format!("{name}:ckpt-step-10")));
    let model = model();
    for at in ["", "checkpoints/step-00000010"] {
        Adapter::load(&model, folder.path().join("jobs").join(id).join(at)).unwrap();
    }
    for (query, folder_name) in [("", id.to_string()), ("?step=10", format!("{id}-step-10"))] {
        let (status, bytes) = client.bytes(&format!("/v1/fine_tuning/jobs/{id}/adapter{query}"));
        assert_eq!(status, 200);
        let mut names = Vec::new();
        let unpacked = tempfile::tempdir().unwrap();
        for entry in tar::Archive::new(bytes.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            names.push(entry.path().unwrap().to_string_lossy().into_owned());
            assert!(entry.unpack_in(unpacked.path()).unwrap());
        }
        assert!(names.contains(&format!("{folder_name}/adapter_config.json")), "{names:?}");
        Adapter::load(&model, unpacked.path().join(folder_name)).unwrap();
    }

    merged_models_are_downloaded(&client, folder.path(), id);

    // The data were needed until the end; lists know the job.
    assert_eq!(client.delete(&format!("/v1/files/{training}")).0, 200);
    let list = client.ok("/v1/fine_tuning/jobs?limit=5&metadata%5Bteam%5D=a");
    assert_eq!((list["data"][0]["id"].as_str(), &list["has_more"]), (Some(id), &json!(false)));
    let none = client.ok("/v1/fine_tuning/jobs?metadata[team]=b");
    assert_eq!(none["data"], json!([]));
    for verb in ["cancel", "pause", "resume"] {
        let answer = client.post(&format!("/v1/fine_tuning/jobs/{id}/{verb}"), &json!({}));
        assert_eq!(answer.0, 400, "{}", answer.1);
    }
    server.stop();
}

/// What a merged model is as files, and that nothing is left of its download, whether or not it came to its end.
fn merged_models_are_downloaded(client: &Client, data: &Path, id: &str) {
    let path = format!("/v1/fine_tuning/jobs/{id}/merged");
    let run = data.join("jobs").join(id);
    for (query, of) in [("", run.clone()), ("?step=10", run.join("checkpoints/step-00000010"))] {
        let (status, bytes) = client.bytes(&format!("{path}{query}"));
        assert_eq!(status, 200);
        let unpacked = tempfile::tempdir().unwrap();
        tar::Archive::new(bytes.as_slice()).unpack(unpacked.path()).unwrap();
        let found = unpacked.path().read_dir().unwrap().next().unwrap().unwrap().path();
        let expected = tempfile::tempdir().unwrap();
        let model = model();
        let merged = Adapter::load(&model, &of).unwrap().merge(model).unwrap();
        merged.save(expected.path(), DType::F32, Some(&demo("base"))).unwrap();
        let names = |folder: &Path| -> BTreeSet<_> {
            folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect()
        };
        assert_eq!(names(&found), names(expected.path()));
        for name in names(expected.path()) {
            let read = |folder: &Path| fs::read(folder.join(&name)).unwrap();
            assert!(read(&found) == read(expected.path()), "{name:?} differs");
        }
    }
    assert_eq!(client.get(&format!("{path}?step=11")).0, 404);
    assert_eq!(client.get(&format!("{path}?step=x")).0, 400);
    assert_eq!(client.get("/v1/fine_tuning/jobs/ftjob-none/merged").0, 404);
    let temporary = || data.join("temporary").read_dir().unwrap().count();
    let begun = Instant::now();
    client.begin(&path);
    while temporary() > 0 {
        assert!(begun.elapsed() < PATIENCE, "the files of a download stay");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn preferences_are_learned_from_a_model_that_was_made_here() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(folder.path());
    let client = Client::of(&server);
    let first = client.job(&json!({
        "model": "demo", "training_file": client.upload(&lines(12)), "hyperparameters": {"n_epochs": 1},
    }));
    let model = client.succeeded(&first)["fine_tuned_model"].as_str().unwrap().to_string();
    let pairs: String = (0..12)
        .map(|number| {
            let user = json!([{"role": "user", "content": format!("What is {number}?")}]);
            let answer = |text: &str| json!([{"role": "assistant", "content": text}]);
            let pair = json!({
                "input": {"messages": user, "tools": []},
                "preferred_output": answer("It is a number."),
                "non_preferred_output": answer("No."),
            });
            format!("{pair}\n")
        })
        .collect();
    let pairs = client.upload(&pairs);
    let method = json!({"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 2, "beta": 0.2}}});
    let request = json!({"model": model, "training_file": pairs, "method": method});
    let second = client.job(&request);
    let job = client.succeeded(&second);
    assert_eq!(job["model"], model.as_str());
    assert_eq!(job["method"]["dpo"]["hyperparameters"]["beta"], 0.2);
    let name = job["fine_tuned_model"].as_str().unwrap();
    assert!(name.starts_with("ft:demo:metal-candle::"), "{name}");
    let told = client.told(&second);
    assert!(told.iter().any(|(_, data)| data["metrics"]["rewards/margins"].is_f64()), "{told:#?}");
    assert_ne!(adapter_bytes(folder.path(), &first), adapter_bytes(folder.path(), &second));

    // What has a conversation beside the pair, as UltraFeedback has, is what the method learns from.
    let user = json!({"role": "user", "content": "What is 1 and 1?"});
    let answer = |text: &str| json!([user, {"role": "assistant", "content": text}]);
    let both = json!({
        "prompt": user["content"], "messages": answer("It is 2."), "score_chosen": 8.5,
        "chosen": answer("It is 2."), "rejected": answer("No."),
    });
    let both = client.upload(&format!("{both}\n").repeat(4));
    for (query, kind) in [
        ("", "conversations"),
        ("?method=supervised", "conversations"),
        ("?method=dpo", "preference pairs"),
    ] {
        let (_, report) = client.post(&format!("/v1/files/{both}/check{query}"), &json!({}));
        assert_eq!(report["kinds"], json!({ kind: 4 }), "{report}");
    }
    let wrong = client.post(&format!("/v1/files/{both}/check?method=kto"), &json!({}));
    assert_eq!(error_of(&wrong), (400, "method"));
    for kind in ["supervised", "dpo"] {
        let method = json!({"type": kind, kind: {"hyperparameters": {"n_epochs": 1}}});
        let request = json!({
            "model": "demo", "training_file": both, "validation_file": both, "method": method,
        });
        let id = client.job(&request);
        client.succeeded(&id);
        let told = client.told(&id);
        let has_margins = told.iter().any(|(_, it)| it["metrics"]["rewards/margins"].is_f64());
        assert_eq!(has_margins, kind == "dpo", "{told:#?}");
    }

    // The same data for the other method, and the other way round.
    for (file, method) in [(pairs, "supervised"), (client.upload(&lines(3)), "dpo")] {
        let request = json!({"model": "demo", "training_file": file, "method": {"type": method}});
        let id = client.job(&request);
        let job = client.until(&id, |job| job["status"] == "failed");
        assert_eq!(job["error"]["code"], "invalid_training_file", "{job}");
    }
    server.stop();
}
