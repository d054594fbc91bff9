//! What a terminal gets to see, in a pseudo-terminal.
#![cfg(unix)]

use crate::common::{Place, terminal};
use metal_candle::text::Tokenizer;
use std::fs::File;
use std::io::Read;
use std::process::Stdio;

/// What the program writes, both streams together, on a terminal.
fn on_a_terminal(place: &Place, arguments: &[&str]) -> String {
    let (controller, terminal) = terminal(0);
    let mut command = place.command(arguments);
    command.stdout(Stdio::from(terminal.try_clone().unwrap())).stderr(Stdio::from(terminal));
    let mut child = command.spawn().unwrap();
    // It holds the terminal's side too, which has to be closed everywhere for an end to come.
    drop(command);
    let mut written = Vec::new();
    // The end is an error on Linux.
    let _ = File::from(controller).read_to_end(&mut written);
    child.wait().unwrap();
    String::from_utf8(written).unwrap()
}

/// What the program writes, both streams together, into pipes.
fn in_a_pipe(place: &Place, arguments: &[&str]) -> String {
    let output = place.run(arguments);
    crate::common::text(&output.stdout) + &crate::common::text(&output.stderr)
}

/// Sets a terminal's title, and paints red: what a program that is up to something might begin with.
const ORDERS: &str = "\u{1b}]0;owned\u{7}\u{1b}[31m";

fn check(place: &Place, arguments: &[&str], around: &str) {
    let piped = in_a_pipe(place, arguments);
    assert!(piped.contains(ORDERS) && piped.contains(around), "{arguments:?}: {piped:?}");
    let shown = on_a_terminal(place, arguments);
    assert!(shown.contains(around), "{arguments:?}: {shown:?}");
    assert!(shown.contains("␛]0;owned␇␛[31m"), "{arguments:?}: {shown:?}");
    // The line ends are the terminal's own.
    let control = shown.chars().find(|c| c.is_control() && !"\r\n\t".contains(*c));
    assert_eq!(control, None, "{arguments:?}: {shown:?}");
}

#[test]
fn what_a_file_or_a_model_says_does_not_order_a_terminal_about() {
    let place = Place::with_model();

    // A key of a file of settings.
    place.write("run.yaml", "\"\\e]0;owned\\a\\e[31m\": 1\n");
    check(&place, &["train", "--config", "run.yaml"], "unknown key");

    // A template's refusal, and the template's error in general.
    place.write("base/chat_template.jinja", &format!("{{{{ raise_exception('{ORDERS}') }}}}"));
    check(&place, &["generate", "--model", "base", "--prompt", "a"], "refused the conversation");
    std::fs::remove_file(place.path("base/chat_template.jinja")).unwrap();

    // The text of a model that prefers one token to all others.
    let tokenizer = Tokenizer::load(&place.path("base")).unwrap();
    let ids = tokenizer.encode("\u{1b}", false).unwrap();
    let bias = format!("{}=1000", ids[0]);
    let generate = ["generate", "--model", "base", "--raw", "--prompt", "a", "-n", "5"];
    let generate = [&generate[..], &["--temperature", "0", "--logit-bias", &bias]].concat();
    let piped = in_a_pipe(&place, &generate);
    assert!(piped.contains("\u{1b}\u{1b}\u{1b}"), "{piped:?}");
    let shown = on_a_terminal(&place, &generate);
    assert!(shown.contains("␛␛␛") && !shown.contains('\u{1b}'), "{shown:?}");
}

#[test]
fn a_record_of_the_data_does_not_order_a_terminal_about() {
    let place = Place::with_model();
    let order = ORDERS.replace('\u{1b}', "\\u001b").replace('\u{7}', "\\u0007");
    place.write("a.jsonl", &format!("{{\"prompt\": \"{order}\", \"completion\": \"around\"}}\n"));
    check(&place, &["data", "a.jsonl"], "around");
    // This program's own colours are the only orders.
    let data = ["data", "a.jsonl", "--model", "base"];
    assert!(in_a_pipe(&place, &data).contains(ORDERS));
    let shown = on_a_terminal(&place, &data);
    assert!(shown.contains("␛]0;owned␇␛[31m"), "{shown:?}");
    assert!(shown.contains("\u{1b}[32maround"), "{shown:?}");
    let others = shown.replace("\u{1b}[32m", "").replace("\u{1b}[0m", "");
    assert!(!others.contains('\u{1b}') && !others.contains('\u{7}'), "{shown:?}");
}

#[test]
fn names_in_an_adapters_files_do_not_order_a_terminal_about() {
    let place = Place::new();
    let config = |kind: &str| {
        let kind = serde_json::to_string(kind).unwrap();
        format!("{{\"peft_type\": {kind}, \"r\": 8, \"target_modules\": [\"q_proj\"]}}")
    };
    place.write("adapter/adapter_config.json", &config(ORDERS));
    for shown in
        [on_a_terminal(&place, &["inspect", "adapter"]), in_a_pipe(&place, &["inspect", "adapter"])]
    {
        assert!(shown.contains("peft_type is") && shown.contains("owned"), "{shown:?}");
        assert!(!shown.contains('\u{1b}'), "{shown:?}");
    }
    // A folder's name comes from the command line, but a script may have made it.
    let name = format!("no{ORDERS}where");
    check(&place, &["inspect", &format!("./{name}")], "where");
}
