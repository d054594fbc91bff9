//! Data sets: their configurations, splits and files, with and without a network.

use super::server::{COMMIT, Server, hub_etag};
use super::*;
use crate::hub::{DatasetChoice, DatasetFiles, resolve_dataset_with};

const FOLDER: &str = "datasets--owner--name";
const CARD: &[u8] = b"---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*
  - split: test
    path: en/test.parquet
- config_name: fr
  data_files: fr/a b.jsonl
---
# A data set
";
const FILES: [(&str, &[u8]); 5] = [
    ("README.md", CARD),
    ("en/test.parquet", b"3"),
    ("en/train-00000-of-00002.parquet", b"1"),
    ("en/train-00001-of-00002.parquet", b"2"),
    ("fr/a b.jsonl", b"{}"),
];

fn dataset(config: Option<&str>, split: &str, options: &HubOptions) -> Result<DatasetFiles> {
    let wanted = |splits: &[&str]| {
        let all = splits.iter().map(|split| split.to_string());
        Ok(if split == "all" { all.collect() } else { vec![split.to_string()] })
    };
    let choice = DatasetChoice { config, revision: None, splits: &wanted };
    resolve_dataset_with("owner/name", &choice, options, &mut |_| {})
}

fn message(result: Result<DatasetFiles>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn the_chosen_splits_of_a_configuration_are_downloaded() {
    let server = Server::new(&FILES);
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(cache.path(), &server.endpoint);
    let found = dataset(Some("en"), "train", &options).unwrap();
    let snapshot = cache.path().join(FOLDER).join("snapshots").join(COMMIT);
    let shard = |index| snapshot.join(format!("en/train-0000{index}-of-00002.parquet"));
    assert_eq!((found.commit.as_str(), found.config.as_str()), (COMMIT, "en"));
    assert_eq!(found.splits, BTreeMap::from([("train".to_string(), vec![shard(0), shard(1)])]));
    assert_eq!(fs::read(shard(1)).unwrap(), b"2");
    assert!(!snapshot.join("en/test.parquet").exists(), "it was not chosen");
    // Links reach the blobs from a folder of any depth.
    assert!(blobs(cache.path(), FOLDER).contains(&hub_etag("x.parquet", b"1")));
    let all = dataset(Some("en"), "all", &options).unwrap();
    assert_eq!(all.splits.keys().collect::<Vec<_>>(), ["test", "train"]);
    let french = dataset(Some("fr"), "all", &options).unwrap();
    assert_eq!(fs::read(&french.splits["train"][0]).unwrap(), b"{}");

    // What is in the cache is enough from now on, and what is not is missed.
    options.offline = true;
    assert_eq!(dataset(Some("en"), "all", &options).unwrap(), all);
    fs::remove_file(shard(1)).unwrap();
    let lacking = message(dataset(Some("en"), "train", &options));
    assert!(lacking.contains("lacks en/train-00001-of-00002.parquet"), "{lacking}");
    assert!(dataset(Some("en"), "test", &options).is_ok());
}

#[test]
fn a_choice_that_there_is_not_names_those_that_there_are() {
    let server = Server::new(&FILES);
    let cache = tempfile::tempdir().unwrap();
    let options = options(cache.path(), &server.endpoint);
    let error = message(dataset(None, "all", &options));
    assert!(error.contains("choose one of its configurations: en, fr"), "{error}");
    let error = message(dataset(Some("de"), "all", &options));
    assert!(error.contains("no configuration \"de\"; there is en, fr"), "{error}");
    let error = message(dataset(Some("en"), "dev", &options));
    assert!(error.contains("no split \"dev\"; there is test, train"), "{error}");
    assert!(server.requests().iter().all(|asked| !asked.path.ends_with(".parquet")));
    let choice = DatasetChoice { config: None, revision: Some("a/../b"), splits: &|_| Ok(vec![]) };
    for id in ["owner/name", "name", "../name"] {
        let result = resolve_dataset_with(id, &choice, &options, &mut |_| {});
        assert!(matches!(result, Err(Error::Option { .. })), "{id}");
    }
}

#[test]
fn a_cache_without_a_list_of_files_is_used_when_its_shards_are_complete() {
    let server = Server::new(&FILES);
    // A server that says no more of files than their names gives no such list.
    server.change(|state| state.has_hashes = false);
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(cache.path(), &server.endpoint);
    dataset(Some("en"), "train", &options).unwrap();
    assert!(!cache.path().join(FOLDER).join("trees").exists());
    options.offline = true;
    assert_eq!(dataset(Some("en"), "train", &options).unwrap().splits["train"].len(), 2);
    let snapshot = cache.path().join(FOLDER).join("snapshots").join(COMMIT);
    fs::remove_file(snapshot.join("en/train-00001-of-00002.parquet")).unwrap();
    let lacking = message(dataset(Some("en"), "train", &options));
    assert!(lacking.contains("lacks en/train-00001-of-00002.parquet"), "{lacking}");
}

#[test]
fn a_pinned_commit_without_a_list_of_files_is_completed() {
    let server = Server::new(&FILES);
    let cache = tempfile::tempdir().unwrap();
    let options = options(cache.path(), &server.endpoint);
    let snapshot = cache.path().join(FOLDER).join("snapshots").join(COMMIT);
    fs::create_dir_all(snapshot.join("en")).unwrap();
    fs::write(snapshot.join("README.md"), CARD).unwrap();
    fs::write(snapshot.join("en/test.parquet"), "3").unwrap();
    fs::write(snapshot.join("en/train-x.parquet"), "another's").unwrap();
    let all = |splits: &[&str]| Ok(splits.iter().map(|split| split.to_string()).collect());
    let choice = DatasetChoice { config: Some("en"), revision: Some(COMMIT), splits: &all };
    let found = || resolve_dataset_with("owner/name", &choice, &options, &mut |_| {}).unwrap();
    assert_eq!(found().splits["train"].len(), 2);
    server.requests();
    assert_eq!(found().splits["train"].len(), 2);
    assert!(server.requests().is_empty());
}

#[test]
fn names_that_lead_out_of_the_cache_are_no_files_of_a_data_set() {
    let server =
        Server::new(&[("../../../../train.jsonl", b"{}"), ("x/\u{1b}[2J/train.jsonl", b"{}")]);
    let cache = tempfile::tempdir().unwrap();
    let error = message(dataset(None, "all", &options(cache.path(), &server.endpoint)));
    assert!(error.contains("no data that is read"), "{error}");
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn a_data_set_that_is_not_there_is_called_one() {
    let server = Server::new(&FILES);
    server.change(|state| state.status.0 = 404);
    let cache = tempfile::tempdir().unwrap();
    let error = message(dataset(None, "all", &options(cache.path(), &server.endpoint)));
    assert!(error.contains("no data set of this id"), "{error}");
}
