use super::schema::MIGRATIONS;
use super::*;
use crate::jobs::{CreateJob, Hyperparameters, tidy_ended};
use crate::keys::{Scope, hash};
use metal_candle::train::{Phase, Position};
use rusqlite::Connection;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use tempfile::TempDir;

fn store() -> (TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&folder.path().join("data")).unwrap();
    (folder, store)
}

fn upload(store: &Store, name: &str) -> StoredFile {
    let mut new = store.begin_file().unwrap();
    new.write(b"{}\n").unwrap();
    store.finish_file(new, name, Purpose::FineTune).unwrap()
}

fn hyperparameters() -> Hyperparameters {
    let request = json!({"model": "m", "training_file": "f"});
    serde_json::from_value::<CreateJob>(request).unwrap().hyperparameters().unwrap()
}

fn new_job(file: &StoredFile) -> NewJob {
    NewJob {
        base: "demo".into(),
        model: "demo".into(),
        suffix: None,
        training_file: file.id.clone(),
        validation_file: None,
        seed: 1,
        metadata: None,
        hyperparameters: hyperparameters(),
    }
}

fn job(store: &Store) -> Job {
    let file = upload(store, "a.jsonl");
    store.add_job(&new_job(&file)).unwrap().unwrap()
}

fn messages(store: &Store, job: &Job) -> Vec<String> {
    let page = store.events(job, None, 100).unwrap().unwrap();
    page.items.into_iter().rev().map(|event| event.message).collect()
}

fn trained(step: i64, place: Place) -> NewEvent {
    let data = Map::from_iter([("train_loss".to_string(), json!(step))]);
    NewEvent::told(format!("step {step} {place:?}")).at(step, place).with(data)
}

#[test]
fn a_folder_belongs_to_one_server_and_is_found_again() {
    let (folder, store) = store();
    let data = folder.path().join("data");
    let error = Store::open(&data).unwrap_err().to_string();
    assert!(error.contains("in use"), "{error}");
    let file = upload(&store, "a.jsonl");
    drop(store);
    let store = Store::open(&data).unwrap();
    assert_eq!(store.file(&file.id).unwrap().unwrap().object(), file.object());
    assert_eq!(fs::read(store.file_path(&file)).unwrap(), b"{}\n");
}

#[cfg(unix)]
#[test]
fn nobody_else_can_read_the_folder_and_the_database() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, store) = store();
    let data = folder.path().join("data");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&data), 0o700);
    let databases = || -> BTreeSet<String> {
        names(&data).unwrap().into_iter().filter(|name| name.starts_with(DATABASE)).collect()
    };
    assert!(databases().contains("server.sqlite-wal"), "{:?}", databases());
    for name in databases() {
        assert_eq!(mode(&data.join(&name)), 0o600, "{name}");
    }
    // Also that of a version before.
    drop(store);
    fs::set_permissions(data.join(DATABASE), fs::Permissions::from_mode(0o644)).unwrap();
    let _store = Store::open(&data).unwrap();
    for name in databases() {
        assert_eq!(mode(&data.join(&name)), 0o600, "{name}");
    }
}

#[test]
fn other_databases_and_newer_ones_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, make: &dyn Fn(&Path)| {
        let data = folder.path().join(name);
        fs::create_dir(&data).unwrap();
        make(&data.join(DATABASE));
        Store::open(&data).map(|_| ()).expect_err(name).to_string()
    };
    let told = refused("text", &|path| fs::write(path, "x".repeat(4096)).unwrap());
    assert!(told.contains("not a database"), "{told}");
    let told = refused("other", &|path| {
        let other = Connection::open(path).unwrap();
        other.execute_batch("CREATE TABLE things (id INTEGER)").unwrap();
    });
    assert!(told.contains("another program"), "{told}");
    let told = refused("newer", &|path| {
        drop(schema::open(path).unwrap());
        let newer = Connection::open(path).unwrap();
        newer.pragma_update(None, "user_version", MIGRATIONS.len() as i64 + 1).unwrap();
    });
    assert!(told.contains("newer"), "{told}");
    let data = folder.path().join("lost");
    drop(Store::open(&data).unwrap());
    fs::remove_file(data.join(DATABASE)).unwrap();
    fs::write(data.join(FILES).join("file-a"), "x").unwrap();
    let told = Store::open(&data).unwrap_err().to_string();
    assert!(told.contains("files/file-a"), "{told}");
    assert!(data.join("files/file-a").exists());
}

#[test]
fn an_older_database_becomes_the_newest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(DATABASE);
    // As a power cut left it: made, but without a table.
    drop(Connection::open(&path).unwrap());
    let connection = schema::open(&path).unwrap();
    let version: i64 =
        connection.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!(version, MIGRATIONS.len() as i64);
    let mode: String =
        connection.pragma_query_value(None, "journal_mode", |row| row.get(0)).unwrap();
    assert_eq!(mode, "wal");
    let synchronous: i64 =
        connection.pragma_query_value(None, "synchronous", |row| row.get(0)).unwrap();
    assert_eq!(synchronous, 2);
    drop(connection);
    schema::open(&path).unwrap();
}

#[test]
fn what_the_database_does_not_know_is_removed_and_nothing_else() {
    let (folder, store) = store();
    let file = upload(&store, "a.jsonl");
    let kept = job(&store);
    fs::create_dir(store.run_folder(&kept)).unwrap();
    let mut begun = store.begin_file().unwrap();
    begun.write(b"half").unwrap();
    std::mem::forget(begun);
    let data = folder.path().join("data");
    for orphan in ["files/file-orphan", "files/notes", "jobs/notes"] {
        fs::write(data.join(orphan), "x").unwrap();
    }
    fs::create_dir_all(data.join("jobs/ftjob-orphan/checkpoints")).unwrap();
    let begun = store.temporary_folder().unwrap().keep();
    fs::write(begun.join("config.json"), "{}").unwrap();
    drop(store);
    let store = Store::open(&data).unwrap();
    assert!(!begun.exists() && data.join("temporary").is_dir());
    let mut left = names(&data.join(FILES)).unwrap();
    left.sort();
    let mut expected = vec![file.id.clone(), kept.asked.training_file.clone(), "notes".into()];
    expected.sort();
    assert_eq!(left, expected);
    let mut left = names(&data.join(JOBS)).unwrap();
    left.sort();
    assert_eq!(left, [kept.id.as_str(), "notes"]);
    assert!(store.file(&file.id).unwrap().is_some());
}

#[test]
fn an_upload_that_is_given_up_leaves_nothing() {
    let (folder, store) = store();
    let mut begun = store.begin_file().unwrap();
    begun.write(b"half").unwrap();
    drop(begun);
    assert_eq!(names(&folder.path().join("data/files")).unwrap().len(), 0);
    assert_eq!(store.list_files(None, 10, true, None).unwrap().unwrap().items.len(), 0);
}

#[test]
fn files_come_in_pages_of_either_order() {
    let (_folder, store) = store();
    let files: Vec<StoredFile> = (0..5).map(|number| upload(&store, &number.to_string())).collect();
    let page = |after: Option<&str>, limit, descending| {
        let page = store.list_files(after, limit, descending, Some("fine-tune")).unwrap().unwrap();
        let names: Vec<String> = page.items.into_iter().map(|file| file.name).collect();
        (names.join(""), page.has_more)
    };
    assert_eq!(page(None, 2, true), ("43".into(), true));
    assert_eq!(page(Some(&files[3].id), 2, true), ("21".into(), true));
    assert_eq!(page(Some(&files[1].id), 2, true), ("0".into(), false));
    assert_eq!(page(Some(&files[0].id), 4, false), ("1234".into(), false));
    assert_eq!(page(None, 4, false), ("0123".into(), true));
    assert!(store.list_files(Some("file-none"), 2, true, None).unwrap().is_none());
    let results = store.list_files(None, 2, true, Some("fine-tune-results")).unwrap().unwrap();
    assert!(results.items.is_empty() && !results.has_more);
}

#[test]
fn a_file_that_a_job_needs_stays() {
    let (_folder, store) = store();
    let job = job(&store);
    let file = &job.asked.training_file;
    assert_eq!(store.remove_file(file).unwrap(), Removal::UsedBy(job.id.clone()));
    store.cancel_job(&job.id).unwrap().unwrap();
    assert_eq!(store.remove_file(file).unwrap(), Removal::Done);
    assert_eq!(store.remove_file(file).unwrap(), Removal::Missing);
    let gone = NewJob { training_file: file.clone(), ..job.asked };
    assert_eq!(store.add_job(&gone).unwrap(), Err("training_file"));
}

#[test]
fn jobs_are_filtered_by_their_metadata() {
    let (_folder, store) = store();
    let file = upload(&store, "a.jsonl");
    let with = |pairs: &[(&str, &str)]| -> Option<BTreeMap<String, String>> {
        Some(pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect())
    };
    let ids: Vec<String> = [
        None,
        with(&[]),
        with(&[("team", "a"), ("it's \"x\".$", "1")]),
        with(&[("team", "b"), ("empty", "")]),
    ]
    .into_iter()
    .map(|metadata| store.add_job(&NewJob { metadata, ..new_job(&file) }).unwrap().unwrap().id)
    .collect();
    let found = |wanted: Option<&[(&str, &str)]>| {
        let wanted: Option<Vec<(String, String)>> = wanted.map(|wanted| {
            wanted.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
        });
        let page = store.list_jobs(None, 10, wanted.as_deref()).unwrap().unwrap();
        let place = |job: Job| ids.iter().position(|id| *id == job.id).unwrap();
        page.items.into_iter().map(place).collect::<Vec<_>>()
    };
    assert_eq!(found(Some(&[])), [3, 2, 1, 0]);
    assert_eq!(found(None), [0]);
    assert_eq!(found(Some(&[("team", "a")])), [2]);
    assert_eq!(found(Some(&[("it's \"x\".$", "1"), ("team", "a")])), [2]);
    assert_eq!(found(Some(&[("it's \"x\".$", "1"), ("team", "b")])), [0; 0]);
    assert_eq!(found(Some(&[("empty", "")])), [3]);
    let page = store.list_jobs(Some(&ids[3]), 2, Some(&[])).unwrap().unwrap();
    assert!(page.has_more && page.items[0].id == ids[2]);
    assert!(store.list_jobs(Some("ftjob-none"), 2, None).unwrap().is_none());
}

#[test]
fn a_job_is_turned_as_its_status_allows() {
    let (_folder, store) = store();
    let job = job(&store);
    let status = || store.job(&job.id).unwrap().unwrap().status;
    assert_eq!(store.resume_job(&job.id).unwrap(), Err(Refusal::Is(Status::ValidatingFiles)));
    store.pause_job(&job.id).unwrap().unwrap();
    assert_eq!(store.pause_job(&job.id).unwrap(), Err(Refusal::Is(Status::Paused)));
    // What was found of its files comes too late.
    store.queue_job(&job.id, &hyperparameters(), &plan(), &[]).unwrap();
    assert_eq!(status(), Status::Paused);
    assert_eq!(store.resume_job(&job.id).unwrap().unwrap().status, Status::ValidatingFiles);
    store.queue_job(&job.id, &hyperparameters(), &plan(), &["short".into()]).unwrap();
    assert_eq!(status(), Status::Queued);
    assert_eq!(store.start_job(&job.id).unwrap(), Started::Yes);
    store.put_back(&job.id).unwrap();
    assert_eq!(status(), Status::Queued);
    assert_eq!(store.start_job(&job.id).unwrap(), Started::Yes);
    let stop = store.signals.begin(&job.id);
    store.pause_job(&job.id).unwrap().unwrap();
    assert!(stop.load(std::sync::atomic::Ordering::Relaxed));
    assert_eq!(store.start_job(&job.id).unwrap(), Started::No);
    assert_eq!(store.resume_job(&job.id).unwrap().unwrap().status, Status::Queued);
    store.start_job(&job.id).unwrap();
    let cancelled = store.cancel_job(&job.id).unwrap().unwrap();
    assert!(cancelled.status == Status::Cancelled && cancelled.finished.is_some());
    let error = JobError { code: "x".into(), message: "late".into(), param: None };
    store.fail_job(&job.id, &error).unwrap();
    let results = store.begin_file().unwrap();
    assert!(!store.finish_job(&job, 1, results, "late.csv").unwrap());
    assert_eq!(status(), Status::Cancelled);
    assert_eq!(store.cancel_job(&job.id).unwrap(), Err(Refusal::Is(Status::Cancelled)));
    assert_eq!(store.cancel_job("ftjob-none").unwrap(), Err(Refusal::Missing));
    let told = messages(&store, &job);
    assert_eq!(told[0], format!("Created fine-tuning job: {}", job.id));
    assert_eq!(told.iter().filter(|told| *told == "Fine-tuning job started").count(), 1);
    assert_eq!(told.last().unwrap(), "Fine-tuning job cancelled");
}

fn plan() -> crate::jobs::Plan {
    crate::jobs::Plan::new(
        crate::jobs::Method::Supervised,
        hyperparameters().choose(10),
        (10, 100),
        &Map::new(),
        1,
        chrono::NaiveDateTime::default(),
    )
}

#[test]
fn a_job_over_which_servers_die_is_given_up() {
    let (_folder, store) = store();
    let job = job(&store);
    store.queue_job(&job.id, &hyperparameters(), &plan(), &[]).unwrap();
    let start = || store.start_job(&job.id).unwrap();
    for _ in 0..30 {
        assert_eq!(start(), Started::Yes);
        store.put_back(&job.id).unwrap();
    }
    for step in 1..=3 {
        for _ in 0..20 {
            assert_eq!(start(), Started::Yes);
        }
        store.add_checkpoint(&job, step, &Map::new(), &(1..=step).collect()).unwrap();
    }
    while start() == Started::Yes {}
    assert_eq!(start(), Started::Deadly(22));
}

#[test]
fn jobs_are_taken_in_their_order() {
    let (_folder, store) = store();
    let (first, second) = (job(&store), job(&store));
    let next = |statuses| store.next_job("demo", statuses).unwrap().map(|job| job.id);
    let validating = [Status::ValidatingFiles; 2];
    assert_eq!(next(validating), Some(first.id.clone()));
    store.queue_job(&first.id, &hyperparameters(), &plan(), &[]).unwrap();
    assert_eq!(next(validating), Some(second.id));
    assert_eq!(next([Status::Queued, Status::Running]), Some(first.id));
    assert!(store.next_job("other", validating).unwrap().is_none());
}

#[test]
fn a_run_that_goes_on_tells_again_what_came_after_its_checkpoint() {
    let (_folder, store) = store();
    let job = job(&store);
    let before = messages(&store, &job);
    let tell = |step, place| store.tell(&job, trained(step, place), None).unwrap();
    let mark = |step| {
        let there = (1..=step).collect();
        store.add_checkpoint(&job, step, &Map::new(), &there).unwrap();
    };
    for step in 1..=3 {
        tell(step, Place::Trained);
        tell(step, Place::Evaluated);
        mark(step);
    }
    let told = |store: &Store| messages(store, &job)[before.len()..].join("; ");
    let whole = told(&store);
    store.rewind(&job, Position { step: 2, phase: Phase::Sampled }).unwrap();
    assert_eq!(store.checkpoint_steps(&job).unwrap(), BTreeSet::from([1, 2]));
    // The run tells of the checkpoint that it goes on from once more.
    mark(2);
    tell(3, Place::Trained);
    tell(3, Place::Evaluated);
    mark(3);
    assert_eq!(told(&store), whole);
    tell(3, Place::Sampled(1));
    store.rewind(&job, Position { step: 3, phase: Phase::Sampled }).unwrap();
    assert!(told(&store).contains("step 3 Sampled(1)"));
    store.rewind(&job, Position { step: 3, phase: Phase::Evaluated }).unwrap();
    assert_eq!(told(&store), whole);
    store.rewind(&job, Position { step: 3, phase: Phase::Trained }).unwrap();
    assert!(!told(&store).contains("step 3 Evaluated") && told(&store).contains("step 3 Trained"));
    store.rewind(&job, Position { step: 0, phase: Phase::Sampled }).unwrap();
    assert_eq!(messages(&store, &job), before);
}

#[test]
fn events_and_checkpoints_come_newest_first() {
    let (_folder, store) = store();
    let job = job(&store);
    for step in 1..=3 {
        let metrics = json!({"step": step}).as_object().cloned().unwrap();
        store.add_checkpoint(&job, step, &metrics, &(1..=3).collect()).unwrap();
    }
    let page = store.checkpoints(&job, None, 2).unwrap().unwrap();
    let steps: Vec<i64> = page.items.iter().map(|checkpoint| checkpoint.step).collect();
    assert!(steps == [3, 2] && page.has_more);
    let rest = store.checkpoints(&job, Some(&page.items[1].id), 2).unwrap().unwrap();
    assert!(rest.items[0].step == 1 && !rest.has_more);
    assert_eq!(rest.items[0].object(&job)["metrics"], json!({"step": 1}));
    let events = store.events(&job, None, 1).unwrap().unwrap();
    assert_eq!(events.items[0].message, "Checkpoint created at step 3");
    assert_eq!(events.items[0].object()["data"], Value::Object(Map::new()));
    assert!(store.events(&job, Some("ftevent-none"), 1).unwrap().is_none());
    // One that the run has removed is not told of any more.
    store.add_checkpoint(&job, 4, &Map::new(), &BTreeSet::from([3, 4])).unwrap();
    assert_eq!(store.checkpoint_steps(&job).unwrap(), BTreeSet::from([3, 4]));
}

#[test]
fn models_are_found_by_name_and_removed_with_their_files() {
    let (_folder, store) = store();
    let file = upload(&store, "a.jsonl");
    let asked = NewJob { suffix: Some("mine".into()), ..new_job(&file) };
    let job = store.add_job(&asked).unwrap().unwrap();
    let run = store.run_folder(&job);
    let checkpoint = checkpoint_folder(&run, 5);
    fs::create_dir_all(&checkpoint).unwrap();
    for folder in [&run, &checkpoint] {
        fs::write(folder.join("adapter_config.json"), "{}").unwrap();
    }
    store.queue_job(&job.id, &hyperparameters(), &plan(), &[]).unwrap();
    store.start_job(&job.id).unwrap();
    store.add_checkpoint(&job, 5, &Map::new(), &BTreeSet::from([5])).unwrap();
    let name = job.tuned_name();
    assert!(name.starts_with("ft:demo:metal-candle:mine:") && name.len() == 26 + 8, "{name}");
    let of_checkpoint = format!("{name}:ckpt-step-5");
    assert_eq!(store.tuned_by_name(&name).unwrap(), None);
    assert_eq!(store.tuned_by_name(&of_checkpoint).unwrap().unwrap().folder, checkpoint);
    let error = store.remove_tuned(&of_checkpoint).unwrap_err().to_string();
    assert!(error.contains(&job.id), "{error}");
    let mut results = store.begin_file().unwrap();
    results.write(b"step\n").unwrap();
    assert!(store.finish_job(&job, 7, results, "step_metrics.csv").unwrap());
    let done = store.job(&job.id).unwrap().unwrap();
    let result = store.file(&done.result_file.unwrap()).unwrap().unwrap();
    assert_eq!((result.purpose, result.bytes), (Purpose::FineTuneResults, 5));
    let names =
        || -> Vec<String> { store.tuned().unwrap().into_iter().map(|tuned| tuned.name).collect() };
    assert_eq!(names(), [name.clone(), of_checkpoint.clone()]);
    assert_eq!(store.tuned_by_name(&name).unwrap().unwrap().folder, run);
    for wrong in [
        "",
        "ft:demo:metal-candle:mine:%",
        "demo",
        &name[..name.len() - 1],
        "ft:::",
        &format!("{name}:ckpt-step-6"),
    ] {
        assert_eq!(store.tuned_by_name(wrong).unwrap(), None, "{wrong}");
        assert!(!store.remove_tuned(wrong).unwrap());
    }
    // A job that goes on from it needs it.
    let next = NewJob { model: name.clone(), ..new_job(&file) };
    let next = store.add_job(&next).unwrap().unwrap();
    assert!(store.remove_tuned(&name).unwrap_err().to_string().contains(&next.id));
    store.cancel_job(&next.id).unwrap().unwrap();
    assert!(store.remove_tuned(&name).unwrap());
    assert!(!run.join("adapter_config.json").exists() && checkpoint.exists());
    assert!(store.remove_tuned(&of_checkpoint).unwrap());
    assert!(!checkpoint.exists() && names().is_empty());
    assert!(!store.remove_tuned(&name).unwrap());
}

#[test]
fn keys_are_changed_beside_a_server() {
    let (folder, store) = store();
    assert!(!store.has_keys().unwrap());
    let keys = Keys::open(&folder.path().join("data")).unwrap();
    let limits = Limits { at_once: Some(2), per_minute: None };
    let scopes = [Scope::Chat, Scope::FineTune];
    let secret = keys.add("laptop", &scopes, limits).unwrap();
    assert!(secret.starts_with("sk-") && secret.len() == 51, "{secret}");
    let taken = keys.add("laptop", &scopes, limits).unwrap_err().to_string();
    assert!(taken.contains("already"), "{taken}");
    let key = store.key_by_hash(&hash(&secret)).unwrap().unwrap();
    assert_eq!((key.name.as_str(), &key.scopes[..], key.limits), ("laptop", &scopes[..], limits));
    assert_eq!(store.key_by_hash(&[8; 32]).unwrap(), None);
    assert!(store.has_keys().unwrap());
    assert_eq!(keys.list().unwrap(), [key]);
    assert!(keys.remove("laptop").unwrap() && !keys.remove("laptop").unwrap());
    assert!(!store.has_keys().unwrap());
    let no_limits = Limits::default();
    for (name, scopes, limits, option) in [
        ("", &scopes[..], no_limits, "name"),
        ("a b", &scopes, no_limits, "name"),
        ("a\u{1b}[31m", &scopes, no_limits, "name"),
        (&"x".repeat(65), &scopes, no_limits, "name"),
        ("x", &[], no_limits, "scopes"),
        ("x", &scopes, Limits { at_once: Some(0), per_minute: None }, "at_once"),
        ("x", &scopes, Limits { at_once: None, per_minute: Some(60_001) }, "per_minute"),
    ] {
        let error = keys.add(name, scopes, limits).unwrap_err();
        let is_about = matches!(&error, Error::Option { option: found, .. } if found == option);
        assert!(is_about, "{option}: {error}");
    }
    assert!(keys.list().unwrap().is_empty());
}

#[test]
fn keys_may_be_made_before_there_is_a_server_and_by_many_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    assert!(Keys::open(&data).is_err() && !data.exists());
    std::thread::scope(|scope| {
        for number in 0..8 {
            let data = &data;
            scope.spawn(move || {
                let keys = Keys::open_or_make(data).unwrap();
                keys.add(&format!("key-{number}"), &[Scope::Chat], Limits::default()).unwrap();
            });
        }
    });
    assert_eq!(Keys::open(&data).unwrap().list().unwrap().len(), 8);
    assert!(Store::open(&data).unwrap().has_keys().unwrap());
}

#[test]
fn keys_of_the_first_version_have_no_limits() {
    let folder = tempfile::tempdir().unwrap();
    let old = Connection::open(folder.path().join(DATABASE)).unwrap();
    old.execute_batch(MIGRATIONS[0]).unwrap();
    old.execute_batch(&format!(
        "INSERT INTO keys VALUES ('old', x'{}', 'chat admin', 5); PRAGMA application_id = 1835234166; \
         PRAGMA user_version = 1",
        "07".repeat(32)
    ))
    .unwrap();
    // A server of that version may go on meanwhile.
    let store = Store::open(folder.path()).unwrap();
    let key = store.key_by_hash(&[7; 32]).unwrap().unwrap();
    assert_eq!((key.created, key.limits), (5, Limits::default()));
    assert_eq!(key.scopes, [Scope::Chat, Scope::Admin]);
    let count: i64 = old.query_row("SELECT count(*) FROM keys", [], |row| row.get(0)).unwrap();
    assert_eq!(count, 1);
}

#[test]
fn jobs_belong_to_the_base_of_their_name() {
    let (_folder, store) = store();
    assert!(store.take_base("demo", "a").unwrap() && store.take_base("demo", "b").unwrap());
    let job = job(&store);
    store.queue_job(&job.id, &hyperparameters(), &plan(), &[]).unwrap();
    assert!(matches!(store.start_job(&job.id).unwrap(), Started::Yes));
    assert!(!store.take_base("demo", "a").unwrap() && store.take_base("demo", "b").unwrap());
    assert!(store.take_base("other", "a").unwrap());
    // Of a server that was killed.
    assert_eq!(store.others_wait("demo").unwrap(), [""; 0]);
    assert_eq!(store.job(&job.id).unwrap().unwrap().status, Status::Running);
    assert_eq!(store.others_wait("other").unwrap(), ["demo"]);
    assert_eq!(store.job(&job.id).unwrap().unwrap().status, Status::Queued);
}

#[test]
fn a_base_is_told_from_another_of_the_same_shape() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let of = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        super::identity(std::slice::from_ref(&path)).unwrap()
    };
    let mut bytes = vec![0; 1 << 20];
    let one = of(&bytes);
    assert_eq!(of(&bytes), one);
    bytes.iter_mut().rev().take(10).for_each(|byte| *byte = 1);
    assert_ne!(of(&bytes), one);
}

#[test]
fn a_checkpoint_that_is_told_of_again_has_the_newest_figures() {
    let (_folder, store) = store();
    let job = job(&store);
    let add = |figures: Value| {
        let figures = figures.as_object().unwrap();
        store.add_checkpoint(&job, 5, figures, &BTreeSet::from([5])).unwrap();
        let page = store.checkpoints(&job, None, 10).unwrap().unwrap();
        let [checkpoint] = &page.items[..] else { panic!("{page:?}") };
        assert_eq!(&checkpoint.metrics, figures);
        (checkpoint.id.clone(), checkpoint.created)
    };
    let before = add(json!({"step": 5, "train_loss": 1.5}));
    // The server was stopped during its evaluation, and the next one has made that.
    assert_eq!(add(json!({"step": 5, "train_loss": 1.5, "valid_loss": 2.5})), before);
    let told = messages(&store, &job);
    assert_eq!(told.iter().filter(|told| told.starts_with("Checkpoint created")).count(), 1);
}

#[test]
fn a_job_that_is_set_aside_waits_with_a_warning_until_it_is_resumed() {
    let (_folder, store) = store();
    let job = job(&store);
    let status = || store.job(&job.id).unwrap().unwrap().status;
    store.set_aside(&job.id, "too early").unwrap();
    assert_eq!(status(), Status::ValidatingFiles);
    store.queue_job(&job.id, &hyperparameters(), &plan(), &[]).unwrap();
    store.start_job(&job.id).unwrap();
    store.set_aside(&job.id, "the dtype is another").unwrap();
    assert_eq!(status(), Status::Paused);
    let newest = store.events(&job, None, 1).unwrap().unwrap().items.remove(0);
    assert_eq!((newest.level.as_str(), newest.message.as_str()), ("warn", "the dtype is another"));
    assert_eq!(store.resume_job(&job.id).unwrap().unwrap().status, Status::Queued);
}

#[test]
fn what_ended_jobs_need_no_more_is_removed_and_those_that_wait_keep_all() {
    let (_folder, store) = store();
    let (ended, waiting) = (job(&store), job(&store));
    for job in [&ended, &waiting] {
        store.queue_job(&job.id, &hyperparameters(), &plan(), &[]).unwrap();
        for step in [1, 2] {
            let checkpoint = checkpoint_folder(&store.run_folder(job), step);
            fs::create_dir_all(&checkpoint).unwrap();
            for name in ["adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json"]
            {
                fs::write(checkpoint.join(name), "x").unwrap();
            }
        }
        // Nobody was told of the second.
        store.add_checkpoint(job, 1, &Map::new(), &BTreeSet::from([1])).unwrap();
    }
    // The server dies before it has tidied the run.
    store.cancel_job(&ended.id).unwrap().unwrap();
    tidy_ended(&store).unwrap();
    let left = |job: &Job, step| {
        let folder = checkpoint_folder(&store.run_folder(job), step);
        folder.is_dir().then(|| names(&folder).unwrap().len())
    };
    assert_eq!([left(&ended, 1), left(&ended, 2)], [Some(1), None]);
    assert_eq!([left(&waiting, 1), left(&waiting, 2)], [Some(3), Some(3)]);
}
