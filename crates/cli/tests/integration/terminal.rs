//! What a person sees in a terminal of a certain width.

#![cfg(unix)]

use crate::common::{Place, terminal, text};
use std::fs::File;
use std::io::Read;
use std::process::Stdio;

/// What the program writes to a terminal of so many columns.
fn on_terminal(place: &Place, columns: u16, arguments: &[&str]) -> String {
    let (ours, theirs) = terminal(columns);
    let mut ours = File::from(ours);
    let mut command = place.command(arguments);
    command.stdout(Stdio::from(theirs.try_clone().unwrap())).stderr(Stdio::from(theirs));
    let mut child = command.spawn().unwrap();
    // The command holds the other end of the terminal open.
    drop(command);
    let mut written = Vec::new();
    let mut piece = [0; 4096];
    // On Linux the end of a terminal is an error.
    while let Ok(count @ 1..) = ours.read(&mut piece) {
        written.extend_from_slice(&piece[..count]);
    }
    child.wait().unwrap();
    without_colours(&text(&written).replace("\r\n", "\n"))
}

/// A text without the codes that make it bold or coloured.
fn without_colours(text: &str) -> String {
    let mut parts = text.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |kept, part| kept + part.split_once('m').map_or("", |(_, rest)| rest))
}

/// A text with Unicode's pictures of control characters in their place, as a terminal gets it.
fn with_pictures(text: &str) -> String {
    let picture = |c: char| match c {
        '\n' | '\t' => Some(c),
        '\0'..='\u{1f}' => char::from_u32(0x2400 + u32::from(c)),
        other => Some(other),
    };
    text.chars().filter_map(picture).collect()
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

#[test]
fn text_is_wrapped_at_the_terminals_width_without_breaking_words() {
    let place = Place::with_model();
    let long = "What is 1? ".repeat(12);
    let commands: [&[&str]; 5] = [
        &["inspect", "base"],
        &["train", "-m", "base", "-d", "data", "--dry-run"],
        &["generate", "-m", "base", "-t", "0", "-n", "60", "--ignore-eos", "-p", &long],
        &["evaluate", "-m", "base", "-d", "data", "--batches", "-7"],
        &["data", "data"],
    ];
    for command in commands {
        let piped = place.run(command);
        let piped = with_pictures(&(text(&piped.stderr) + &text(&piped.stdout)));
        for columns in [80, 60] {
            let shown = on_terminal(&place, columns, command);
            assert_eq!(words(&shown), words(&piped), "{command:?}");
            for line in shown.lines() {
                // A word that is longer than a row is nobody's mistake.
                let fits = line.chars().count() <= usize::from(columns);
                assert!(fits || words(line).len() <= 2, "{columns}: {line}");
            }
        }
    }
    let help = on_terminal(&place, 60, &["train", "--help"]);
    assert!(
        help.lines().all(|line| line.chars().count() <= 60 || words(line).len() == 1),
        "{help}"
    );
}
