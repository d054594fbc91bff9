//! Records to masked tokens and to batches, with the fixtures' tokenizers.

use std::path::Path;
use std::sync::Arc;

use metal_candle::data::{
    Batch, BatchOptions, Batcher, Body, DataOptions, Dataset, Example, IGNORED, LossOn, Record,
    Report, read_records,
};
use metal_candle::random::SplitMix64;
use metal_candle::text::{Message, Tokenizer};
use serde_json::{Value, json};

fn folder(name: &str) -> std::path::PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures")).join(name)
}

fn with_template(name: &str, template: &str) -> Tokenizer {
    let source = std::fs::read_to_string(folder(&format!("templates/{template}.jinja"))).unwrap();
    let mut tokenizer = Tokenizer::load(&folder(name)).unwrap();
    tokenizer.set_chat_template(&source).unwrap();
    tokenizer
}

/// The fixtures' tokenizer without its chat template.
fn without_template(name: &str) -> Tokenizer {
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(folder(name).join("tokenizer.json"), copy.path().join("tokenizer.json")).unwrap();
    let path = copy.path().join("tokenizer_config.json");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(folder(name).join("tokenizer_config.json")).unwrap())
            .unwrap();
    config.as_object_mut().unwrap().remove("chat_template");
    std::fs::write(path, config.to_string()).unwrap();
    Tokenizer::load(copy.path()).unwrap()
}

fn chat(turns: &[(&str, &str)]) -> Record {
    let messages = turns.iter().map(|(role, content)| Message::new(*role, *content)).collect();
    Body::Messages { messages, tools: None }.into()
}

fn pair(prompt: &str, completion: &str) -> Record {
    Body::PromptCompletion { prompt: prompt.into(), completion: completion.into() }.into()
}

fn text(text: &str) -> Record {
    Body::Text { text: text.into() }.into()
}

fn options(loss_on: Option<LossOn>) -> DataOptions {
    DataOptions { loss_on, ..DataOptions::default() }
}

/// The runs of trainable tokens of a record, decoded, and the whole.
fn learned(
    tokenizer: &Tokenizer,
    record: Record,
    loss_on: Option<LossOn>,
) -> (Vec<String>, String) {
    let dataset = Dataset::build(&[record], tokenizer, &options(loss_on)).unwrap();
    let Example { ids, trainable } = &dataset.examples[0];
    let mut runs: Vec<Vec<u32>> = Vec::new();
    for (index, (id, flag)) in ids.iter().zip(trainable).enumerate() {
        match runs.last_mut() {
            Some(run) if *flag && trainable[index - 1] => run.push(*id),
            _ if *flag => runs.push(vec![*id]),
            _ => {}
        }
    }
    let decode = |ids: &[u32]| tokenizer.decode(ids, false).unwrap();
    (runs.iter().map(|run| decode(run)).collect(), decode(ids))
}

const TURNS: [(&str, &str); 5] = [
    ("system", "Short."),
    ("user", "One 東京?"),
    ("assistant", "  1 🙂, 東京"),
    ("user", "Two?"),
    ("assistant", "2    "),
];

#[test]
fn every_assistant_turn_is_learned_to_the_byte() {
    for template in ["chatml", "chatml-generation", "qwen-tools"] {
        let tokenizer = with_template("tokenizer", template);
        let think = if template == "qwen-tools" { "<think>\n\n</think>\n\n" } else { "" };
        let first = "  1 🙂, 東京<|im_end|>".to_string();
        let last = format!("{think}2    <|im_end|>");
        let (runs, whole) = learned(&tokenizer, chat(&TURNS), None);
        assert_eq!(runs, [first.clone(), last.clone()], "{template}: {whole}");
        assert_eq!(
            learned(&tokenizer, chat(&TURNS), Some(LossOn::Assistant)).0,
            [first, last.clone()]
        );
        assert_eq!(learned(&tokenizer, chat(&TURNS), Some(LossOn::Completion)).0, [last]);
        let (runs, whole) = learned(&tokenizer, chat(&TURNS), Some(LossOn::All));
        // The first token, <|im_start|>, is nobody's prediction.
        assert_eq!(runs, [whole.strip_prefix("<|im_start|>").unwrap()]);
    }
}

#[test]
fn a_conversation_that_goes_on_is_learned_from_there() {
    let messages = |turns: &[(&str, &str)]| {
        turns.iter().map(|(role, text)| Message::new(*role, *text)).collect()
    };
    let body = Body::ChatCompletion {
        prompt: messages(&TURNS[..4]),
        completion: messages(&TURNS[4..]),
        tools: None,
    };
    for template in ["chatml", "chatml-generation"] {
        let tokenizer = with_template("tokenizer", template);
        assert_eq!(learned(&tokenizer, body.clone().into(), None).0, ["2    <|im_end|>"]);
        assert_eq!(learned(&tokenizer, body.clone().into(), Some(LossOn::Assistant)).0.len(), 2);
    }
}

#[test]
fn prompts_and_completions_go_through_the_template_if_there_is_one() {
    let tokenizer = with_template("tokenizer", "chatml-generation");
    let (runs, whole) = learned(&tokenizer, pair("Two?", " 2"), None);
    assert_eq!(runs, [" 2<|im_end|>"]);
    assert_eq!(whole, "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n 2<|im_end|>\n");

    let tokenizer = without_template("tokenizer");
    for loss_on in [None, Some(LossOn::Completion), Some(LossOn::Assistant)] {
        let (runs, whole) = learned(&tokenizer, pair("Two 東京? ", "2 🙂"), loss_on);
        assert_eq!(
            (runs, whole.as_str()),
            (vec!["2 🙂<|im_end|>".to_string()], "Two 東京? 2 🙂<|im_end|>")
        );
    }
    let (runs, _) = learned(&tokenizer, pair("Two?", "2"), Some(LossOn::All));
    assert_eq!(runs, ["wo?2<|im_end|>"]);
    // The token of the completion's first word also holds the space that ends the prompt.
    let (runs, whole) = learned(&without_template("tokenizer-sp"), pair("Say ", "the"), None);
    assert!(
        runs.len() == 1 && runs[0].trim_start().starts_with("the</s>"),
        "{runs:?} of {whole:?}"
    );
    let message =
        Dataset::build(&[chat(&TURNS)], &tokenizer, &options(None)).unwrap_err().to_string();
    assert!(message.contains("has no chat template"), "{message}");
}

#[test]
fn texts_begin_and_end_with_their_tokens_once() {
    let tokenizer = without_template("tokenizer-sp");
    let ids = |record: Record| {
        Dataset::build(&[record], &tokenizer, &options(None)).unwrap().examples[0].clone()
    };
    let plain = tokenizer.encode("a text", true).unwrap();
    let eos = tokenizer.eos_id().unwrap();
    let example = ids(text("a text"));
    assert_eq!(example.ids, [plain.as_slice(), &[eos]].concat());
    assert_eq!(example.ids.first().copied(), tokenizer.bos_id());
    assert_eq!(example.trainable.iter().position(|flag| *flag), Some(1));
    assert!(example.trainable[1..].iter().all(|flag| *flag));
    assert_eq!(ids(text("a text</s>")), example);
}

#[test]
fn the_loss_on_turns_is_refused_for_texts() {
    let tokenizer = without_template("tokenizer");
    for loss_on in [LossOn::Assistant, LossOn::Completion] {
        let message = Dataset::build(&[text("a")], &tokenizer, &options(Some(loss_on)))
            .unwrap_err()
            .to_string();
        assert!(message.contains("record 1: loss_on") && message.contains("\"all\""), "{message}");
    }
}

#[test]
fn truncated_and_dropped_records_are_counted() {
    let tokenizer = with_template("tokenizer", "chatml-generation");
    let only_user = chat(&[("user", "hi")]);
    let late = chat(&[("user", &"word ".repeat(40)), ("assistant", "never reached")]);
    let records = [
        chat(&[("user", "a"), ("assistant", "b")]),
        only_user.clone(),
        late.clone(),
        text(&"w ".repeat(99)),
    ];
    let limit = 30;
    let dataset = Dataset::build(
        &records,
        &tokenizer,
        &DataOptions { max_seq_length: limit, ..options(None) },
    )
    .unwrap();
    let lengths: Vec<usize> = dataset.examples.iter().map(|example| example.ids.len()).collect();
    let trainable = |example: &Example| example.trainable.iter().filter(|flag| **flag).count();
    assert_eq!(lengths[1], limit);
    assert!(dataset.examples.iter().all(|example| example.trainable.len() == example.ids.len()));
    assert_eq!(
        dataset.report,
        Report {
            records: 4,
            examples: 2,
            truncated: 2,
            dropped_untrainable: 2,
            tokens: lengths.iter().sum(),
            trainable_tokens: dataset.examples.iter().map(trainable).sum(),
            longest: limit,
            mean_length: lengths.iter().sum::<usize>() as f64 / 2.0,
        }
    );
    let words = dataset.report.to_string();
    assert!(
        words.contains("2 examples of 4 records") && words.contains("2 truncated; 2 dropped"),
        "{words}"
    );

    let build = |records: &[Record], max_seq_length| {
        let options = DataOptions { max_seq_length, ..options(None) };
        Dataset::build(records, &tokenizer, &options)
            .map(|dataset| dataset.report)
            .unwrap_err()
            .to_string()
    };
    let message = build(&[only_user, late], limit);
    assert!(
        message.contains("none of the 2 records") && message.contains("1 were cut"),
        "{message}"
    );
    assert!(build(&[], limit).contains("there are no records"));
    assert!(build(&[text("a")], 1).contains("max_seq_length: is 1"));
}

#[test]
fn a_record_the_template_refuses_is_named_by_its_line() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let line = |role: &str| json!({"messages": [{"role": role, "content": "x"}]}).to_string();
    std::fs::write(
        file.path(),
        [line("user"), String::new(), line("system"), line("assistant")].join("\n"),
    )
    .unwrap();
    let records = read_records(file.path()).unwrap();
    let tokenizer = with_template("tokenizer-sp", "gemma");
    let message = Dataset::build(&records, &tokenizer, &options(None)).unwrap_err().to_string();
    assert!(
        message.contains(":3: chat template: ") && message.contains("System role not supported"),
        "{message}"
    );
}

#[test]
fn the_order_of_examples_is_that_of_the_records() {
    let tokenizer = without_template("tokenizer");
    let records: Vec<Record> = (0..300).map(|index| text(&format!("{index} "))).collect();
    let dataset = Dataset::build(&records, &tokenizer, &options(None)).unwrap();
    for (index, example) in dataset.examples.iter().enumerate() {
        assert_eq!(tokenizer.decode(&example.ids, true).unwrap(), format!("{index} "));
    }
}

/// Examples of random lengths and masks whose tokens are all different.
fn random_dataset(count: usize, longest: u64) -> Arc<Dataset> {
    let mut random = SplitMix64::new(5);
    let mut next = 0;
    let examples = (0..count)
        .map(|_| {
            let length = 2 + random.below(longest - 1) as usize;
            let ids = (next..next + length as u32).collect();
            next += length as u32;
            let mut trainable: Vec<bool> = (0..length).map(|_| random.below(3) > 0).collect();
            trainable[0] = false;
            Example { ids, trainable }
        })
        .collect();
    Arc::new(Dataset { examples, report: Report::default() })
}

/// Checks every place of a batch against the examples of its plan.
fn check(dataset: &Dataset, rows: &[Vec<usize>], batch: &Batch, max_seq_length: usize) {
    assert_eq!(batch.rows, rows.len());
    assert!(
        batch.length <= max_seq_length
            && (batch.length.is_multiple_of(8) || batch.length == max_seq_length)
    );
    let (mut tokens, mut target_tokens, mut longest) = (0, 0, 0);
    for array in [&batch.input_ids, &batch.targets, &batch.positions, &batch.first_key] {
        assert_eq!(array.len(), batch.rows * batch.length);
    }
    for (row, indices) in rows.iter().enumerate() {
        let mut place = row * batch.length;
        for index in indices {
            let Example { ids, trainable } = &dataset.examples[*index];
            let start = place - row * batch.length;
            for position in 0..ids.len() - 1 {
                assert_eq!(batch.input_ids[place], ids[position]);
                let target = if trainable[position + 1] { ids[position + 1] } else { IGNORED };
                assert_eq!(batch.targets[place], target);
                assert_eq!(batch.positions[place] as usize, position);
                assert_eq!(batch.first_key[place] as usize, start);
                target_tokens += usize::from(target != IGNORED);
                place += 1;
            }
        }
        let used = place - row * batch.length;
        tokens += used;
        longest = longest.max(used);
        for column in used..batch.length {
            let place = row * batch.length + column;
            assert_eq!(
                (
                    batch.input_ids[place],
                    batch.targets[place],
                    batch.positions[place],
                    batch.first_key[place]
                ),
                (0, IGNORED, 0, column as u32)
            );
        }
    }
    assert_eq!((batch.tokens, batch.target_tokens), (tokens, target_tokens));
    assert!(batch.length < longest + 8);
}

#[test]
fn every_example_is_in_each_epoch_once_and_whole() {
    for (packing, shuffle, max_seq_length, batch_size) in [
        (true, true, 61, 3),
        (true, false, 64, 4),
        (false, true, 61, 3),
        (false, false, 64, 7),
        (true, true, 59, 1),
    ] {
        let dataset = random_dataset(500, 60);
        let options = BatchOptions { batch_size, max_seq_length, packing, seed: 1, shuffle };
        let batcher = Batcher::new(dataset.clone(), options).unwrap();
        for epoch in 0..3 {
            let plans = batcher.epoch(epoch);
            let mut seen: Vec<usize> =
                plans.iter().flat_map(|plan| plan.rows.iter().flatten().copied()).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..500).collect::<Vec<_>>());
            let short = plans.iter().filter(|plan| plan.rows.len() < batch_size).count();
            assert!(short <= 1 && plans.iter().all(|plan| !plan.rows.is_empty()));
            assert!(packing || plans.iter().flat_map(|plan| &plan.rows).all(|row| row.len() == 1));
            let (mut tokens, mut places) = (0, 0);
            for plan in &plans {
                let batch = batcher.batch(plan);
                check(&dataset, &plan.rows, &batch, max_seq_length);
                tokens += batch.tokens;
                places += batch.input_ids.len();
            }
            // Hardly any padding, in either way.
            assert!(tokens as f64 > 0.85 * places as f64, "{tokens} of {places}");
            assert_eq!(
                tokens,
                dataset.examples.iter().map(|example| example.ids.len() - 1).sum::<usize>()
            );
        }
    }
}

#[test]
fn the_order_depends_on_seed_and_epoch_alone() {
    let dataset = random_dataset(200, 40);
    let batcher = |packing, seed, shuffle| {
        let options = BatchOptions { batch_size: 4, max_seq_length: 50, packing, seed, shuffle };
        Batcher::new(dataset.clone(), options).unwrap()
    };
    for packing in [true, false] {
        let epochs: Vec<_> = (0..4).map(|epoch| batcher(packing, 9, true).epoch(epoch)).collect();
        for (epoch, plans) in epochs.iter().enumerate() {
            assert_eq!(*plans, batcher(packing, 9, true).epoch(epoch));
            assert_ne!(*plans, batcher(packing, 10, true).epoch(epoch));
            assert!(epochs[..epoch].iter().all(|other| other != plans));
        }
        assert_eq!(batcher(packing, 9, false).epoch(0), batcher(packing, 10, false).epoch(1));
    }
    // Written down once, so that a change of the order, which would break resuming a run, is seen.
    let small = random_dataset(6, 9);
    let options =
        BatchOptions { batch_size: 2, max_seq_length: 16, packing: true, seed: 7, shuffle: true };
    let rows: Vec<_> = Batcher::new(small, options)
        .unwrap()
        .epoch(3)
        .into_iter()
        .flat_map(|plan| plan.rows)
        .collect();
    assert_eq!(rows, [vec![2, 3, 5], vec![4, 1, 0]]);
}

#[test]
fn batches_that_cannot_be_are_refused() {
    let options =
        BatchOptions { batch_size: 1, max_seq_length: 8, packing: false, seed: 0, shuffle: false };
    let dataset = |ids: usize, trainable: usize| {
        let examples = vec![Example { ids: vec![1; ids], trainable: vec![false; trainable] }];
        Arc::new(Dataset { examples, report: Report::default() })
    };
    let error = |dataset, options| Batcher::new(dataset, options).unwrap_err().to_string();
    assert!(Batcher::new(dataset(9, 9), options).is_ok());
    assert!(error(dataset(10, 10), options).contains("example 0 has 10 tokens"));
    assert!(error(dataset(1, 1), options).contains("2 or more"));
    assert!(error(dataset(3, 2), options).contains("2 mask values"));
    assert!(
        error(dataset(3, 3), BatchOptions { batch_size: 0, ..options })
            .contains("batch_size: is 0")
    );
    let empty = Arc::new(Dataset { examples: Vec::new(), report: Report::default() });
    assert!(error(empty, options).contains("no examples"));
}
