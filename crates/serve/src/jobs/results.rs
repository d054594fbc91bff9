//! The result file of a job: the figures of its steps, as OpenAI's CSV has them.

use super::log::{TRAIN_ACCURACY, TRAIN_LOSS, VALID_ACCURACY, VALID_LOSS};
use crate::store::Event;
use serde_json::Value;
use std::collections::BTreeMap;

/// What it is called.
pub(super) const NAME: &str = "step_metrics.csv";
const HEADER: &str = "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy";
const COLUMNS: [&str; 4] = [TRAIN_LOSS, TRAIN_ACCURACY, VALID_LOSS, VALID_ACCURACY];

/// The file's text: a line for each step that was reported, with nothing where there is no figure.
pub(super) fn csv(events: &[Event]) -> String {
    let mut steps: BTreeMap<i64, [String; COLUMNS.len()]> = BTreeMap::new();
    for event in events.iter().filter(|event| !event.is_sample()) {
        let (Some((step, _)), Some(data)) = (&event.place, &event.data) else { continue };
        let row = steps.entry(*step).or_default();
        for (cell, name) in row.iter_mut().zip(COLUMNS) {
            if let Some(Value::Number(number)) = data.get(name) {
                *cell = number.to_string();
            }
        }
    }
    let mut text = format!("{HEADER}\n");
    for (step, row) in steps {
        text.push_str(&format!("{step},{}\n", row.join(",")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_step_is_a_line_with_all_that_is_known_of_it() {
        let event = |step: i64, data: Value| Event {
            id: String::new(),
            created: 0,
            level: "info".into(),
            message: String::new(),
            data: data.as_object().cloned(),
            place: Some((step, "trained".into())),
        };
        let events = [
            event(1, json!({"train_loss": 0.5, "valid_loss": null})),
            event(2, json!({"train_loss": 0.25})),
            event(
                2,
                json!({"valid_loss": 1.0, "valid_mean_token_accuracy": 0.75, "train_loss": null}),
            ),
            event(3, Value::Null),
        ];
        assert_eq!(csv(&events), format!("{HEADER}\n1,0.5,,,\n2,0.25,,1.0,0.75\n"));
    }
}
