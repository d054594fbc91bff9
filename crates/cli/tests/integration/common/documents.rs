//! The command lines of `metal-candle` that documents, workflows and help texts hold.

use std::path::{Path, PathBuf};

/// A command line, its program's name left out, and where it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Documented {
    pub place: String,
    pub arguments: Vec<String>,
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every command line of the repository's documents and workflows.
pub fn all() -> Vec<Documented> {
    let root = repository();
    let mut files: Vec<PathBuf> =
        ["README.md", "BENCHMARKS.md", "CONTRIBUTING.md", "fixtures/README.md", ".ci/run"]
            .iter()
            .map(|name| root.join(name))
            .collect();
    let folders = [("docs", "md"), ("crates/cli/demo", "md"), (".github/workflows", "yml")];
    for (folder, extension) in folders {
        files.extend(files_below(&root.join(folder), extension));
    }
    files
        .iter()
        .flat_map(|file| {
            let text = std::fs::read_to_string(file)
                .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            let place = file.strip_prefix(&root).unwrap().display().to_string();
            let is_markdown = file.extension().is_some_and(|extension| extension == "md");
            commands(&place, &text, is_markdown)
        })
        .collect()
}

fn files_below(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_below(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The command lines of one text. Those of Markdown stand in code alone; anything else is code.
pub fn commands(place: &str, text: &str, is_markdown: bool) -> Vec<Documented> {
    let mut code: Vec<String> = Vec::new();
    let mut prose = String::new();
    let mut fenced = false;
    let mut continued = String::new();
    for line in text.lines() {
        if is_markdown && line.trim_start().starts_with("```") {
            fenced = !fenced;
            // What stands on both sides of a block is not one sentence.
            prose.push_str("\n\n");
        } else if !is_markdown || fenced || line.starts_with("    ") || !continued.is_empty() {
            match line.trim_end().strip_suffix('\\') {
                Some(part) => continued.push_str(part),
                None => code.push(std::mem::take(&mut continued) + line),
            }
        } else {
            prose.push_str(line);
            prose.push('\n');
        }
    }
    // A span of code ends in its own paragraph.
    for paragraph in prose.split("\n\n") {
        let spans = paragraph.split('`').skip(1).step_by(2);
        code.extend(spans.map(|span| span.replace('\n', " ")));
    }
    code.iter()
        .flat_map(|line| line.split(['|', ';', '>']).flat_map(|line| line.split("&&")))
        .filter_map(|line| arguments(line.trim()))
        .map(|arguments| Documented { place: place.into(), arguments })
        .collect()
}

/// What a line that runs the program tells it.
fn arguments(line: &str) -> Option<Vec<String>> {
    let line = line.trim_start_matches("- ").trim_start_matches("run: ").trim_start_matches("$ ");
    let words = shlex::split(line)?;
    let is_variable = |word: &&String| {
        word.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
        })
    };
    let words: Vec<String> = words.iter().skip_while(is_variable).cloned().collect();
    let program = words.first()?;
    if program == "cargo" && words.get(1).is_some_and(|word| word == "run") {
        let own = words.iter().position(|word| word == "--")?;
        let (cargo, rest) = words.split_at(own);
        let other = cargo.iter().any(|word| ["--example", "--bin", "-p"].contains(&word.as_str()));
        return (!other).then(|| rest[1..].to_vec());
    }
    let is_program = program == "metal-candle" || program.ends_with("/metal-candle");
    (is_program && words.len() > 1).then(|| words[1..].to_vec())
}
