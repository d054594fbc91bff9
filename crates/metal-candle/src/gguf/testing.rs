//! What the tests of this module share.

use std::path::{Path, PathBuf};

use crate::model::Config;

/// A folder of the fixtures.
pub fn fixture_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// The configuration of a model of the fixtures.
pub fn fixture(name: &str) -> Config {
    Config::load(fixture_folder("models").join(name)).unwrap()
}

/// The models of the fixtures: their names and configurations.
pub fn fixtures() -> Vec<(String, Config)> {
    let names = std::fs::read_dir(fixture_folder("models")).unwrap();
    let mut names: Vec<String> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names.into_iter().map(|name| (name.clone(), fixture(&name))).collect()
}
