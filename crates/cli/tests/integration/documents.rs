//! What documents tell people to type works: the quick commands are run here, and the parser is asked
//! about all of them in `src/main.rs`.

use crate::common::{Place, documents};

#[test]
fn documented_commands_that_take_no_time_are_run() {
    let mut run = 0;
    for command in documents::all() {
        let arguments: Vec<&str> = command.arguments.iter().map(String::as_str).collect();
        let quick = arguments.iter().any(|word| ["--help", "help", "--floors"].contains(word));
        if quick {
            assert!(!Place::new().ok(&arguments).is_empty(), "{command:?}");
            run += 1;
        }
    }
    assert!(run >= 3, "{run} commands of documents were run");
}
