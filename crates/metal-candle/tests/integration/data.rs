//! Records to masked tokens and to batches, with the fixtures' tokenizers.

use std::path::Path;
use std::sync::Arc;

use metal_candle::data::{
    Batch, BatchOptions, BatchPlan, Batcher, Body, Columns, DataFiles, DataOptions, DataSource,
    Dataset, Example, HeldOut, IGNORED, LossOn, Reading, Record, Report, Shown, Slice, Source,
    Split, Template, describe, read_records, survey, tokenize,
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
    let Example { ids, trainable } = dataset.get(0).unwrap();
    let mut runs: Vec<Vec<u32>> = Vec::new();
    for (index, (id, flag)) in ids.iter().zip(&trainable).enumerate() {
        match runs.last_mut() {
            Some(run) if *flag && trainable[index - 1] => run.push(*id),
            _ if *flag => runs.push(vec![*id]),
            _ => {}
        }
    }
    let decode = |ids: &[u32]| tokenizer.decode(ids, false).unwrap();
    (runs.iter().map(|run| decode(run)).collect(), decode(&ids))
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
        Dataset::build(&[record], &tokenizer, &options(None)).unwrap().get(0).unwrap()
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
    let lengths: Vec<usize> = dataset.iter().map(|example| example.ids.len()).collect();
    let trainable = |example: &Example| example.trainable.iter().filter(|flag| **flag).count();
    assert_eq!(lengths[1], limit);
    assert!(dataset.iter().all(|example| example.trainable.len() == example.ids.len()));
    assert_eq!(
        dataset.report,
        Report {
            records: 4,
            examples: 2,
            truncated: 2,
            dropped_empty: 0,
            dropped_equal: 0,
            dropped_untrainable: 2,
            tokens: lengths.iter().sum(),
            trainable_tokens: dataset.iter().map(|example| trainable(&example)).sum(),
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
    for (index, example) in dataset.iter().enumerate() {
        assert_eq!(tokenizer.decode(&example.ids, true).unwrap(), format!("{index} "));
    }
}

/// Examples of random lengths and masks whose tokens are all different.
fn random_dataset(count: usize, longest: u64) -> Arc<Dataset> {
    let mut random = SplitMix64::new(5);
    let mut next = 0;
    let examples: Vec<_> = (0..count)
        .map(|_| {
            let length = 2 + random.below(longest - 1) as usize;
            let ids = (next..next + length as u32).collect();
            next += length as u32;
            let mut trainable: Vec<bool> = (0..length).map(|_| random.below(3) > 0).collect();
            trainable[0] = false;
            trainable[length - 1] = true;
            Example { ids, trainable }
        })
        .collect();
    Arc::new(Dataset::from_examples(&examples).unwrap())
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
            let Example { ids, trainable } = dataset.get(*index).unwrap();
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
        let options = BatchOptions {
            batch_size,
            max_seq_length,
            packing,
            seed: 1,
            shuffle,
            ..BatchOptions::default()
        };
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
                let batch = batcher.batch(plan).unwrap();
                check(&dataset, &plan.rows, &batch, max_seq_length);
                tokens += batch.tokens;
                places += batch.input_ids.len();
            }
            // Hardly any padding, in either way.
            assert!(tokens as f64 > 0.85 * places as f64, "{tokens} of {places}");
            assert_eq!(tokens, dataset.iter().map(|example| example.ids.len() - 1).sum::<usize>());
        }
    }
}

#[test]
fn the_order_depends_on_seed_and_epoch_alone() {
    let dataset = random_dataset(200, 40);
    let batcher = |packing, seed, shuffle| {
        let options = BatchOptions {
            batch_size: 4,
            max_seq_length: 50,
            packing,
            seed,
            shuffle,
            ..BatchOptions::default()
        };
        Batcher::new(dataset.clone(), options).unwrap()
    };
    for packing in [true, false] {
        let epochs: Vec<_> = (0..4).map(|epoch| batcher(packing, 9, true).epoch(epoch)).collect();
        for (epoch, plans) in epochs.iter().enumerate() {
            assert_eq!(*plans, batcher(packing, 9, true).epoch(epoch));
            assert_eq!(plans.len(), batcher(packing, 9, true).batch_count(epoch));
            assert_ne!(*plans, batcher(packing, 10, true).epoch(epoch));
            assert!(epochs[..epoch].iter().all(|other| other != plans));
        }
        assert_eq!(batcher(packing, 9, false).epoch(0), batcher(packing, 10, false).epoch(1));
    }
    // Written down once, so that a change of the order, which would break resuming a run, is seen.
    let small = random_dataset(6, 9);
    let options = BatchOptions {
        batch_size: 2,
        max_seq_length: 16,
        packing: true,
        seed: 7,
        shuffle: true,
        ..BatchOptions::default()
    };
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
    let options = BatchOptions {
        batch_size: 1,
        max_seq_length: 8,
        packing: false,
        seed: 0,
        shuffle: false,
        ..BatchOptions::default()
    };
    let dataset = |ids: usize, trainable: usize| {
        Dataset::from_examples(&[Example { ids: vec![1; ids], trainable: vec![true; trainable] }])
    };
    let error = |dataset, options| {
        Batcher::new(Arc::new(dataset), options).map(|_| ()).unwrap_err().to_string()
    };
    assert!(Batcher::new(Arc::new(dataset(9, 9).unwrap()), options).is_ok());
    assert!(error(dataset(10, 10).unwrap(), options).contains("example 0 has 10 tokens"));
    assert!(
        error(dataset(3, 3).unwrap(), BatchOptions { batch_size: 0, ..options })
            .contains("batch_size: is 0")
    );
    let batcher = Batcher::new(Arc::new(dataset(9, 9).unwrap()), options).unwrap();
    let other = BatchPlan { rows: vec![vec![0], vec![1]] };
    let message = batcher.batch(&other).unwrap_err().to_string();
    assert_eq!(message, "data: have no example 1; there are 1");
    let refused = |dataset: metal_candle::Result<Dataset>| dataset.unwrap_err().to_string();
    assert!(refused(dataset(1, 1)).contains("2 or more"));
    assert!(refused(dataset(3, 2)).contains("2 mask values"));
    let nothing = Example { ids: vec![1; 3], trainable: vec![true, false, false] };
    assert!(
        refused(Dataset::from_examples(&[nothing])).contains("example 0 has no token to learn")
    );
    assert!(refused(Dataset::from_examples(&[])).contains("no examples"));
    let with_id = |id| Example { ids: vec![1, id, 1], trainable: vec![true; 3] };
    assert_eq!(
        refused(Dataset::from_examples(&[with_id((1 << 31) - 1), with_id(1 << 31)])),
        "data: example 1 has the token id 2147483648; at most 2147483647 is supported"
    );
    assert!(Dataset::from_examples(&[with_id((1 << 31) - 1)]).is_ok());
}

/// Conversations of many lengths, as lines of JSON.
fn conversations(range: std::ops::Range<usize>) -> String {
    range
        .map(|index| {
            let answer = "word ".repeat(index * 7 % 23);
            let messages = [
                json!({"role": "user", "content": format!("{index}?")}),
                json!({"role": "assistant", "content": answer}),
            ];
            format!("{}\n", json!({"messages": messages}))
        })
        .collect()
}

fn source(files: &[std::path::PathBuf], weight: Option<f64>) -> DataSource {
    DataSource { weight, ..DataSource::new(files) }
}

fn batches(dataset: Dataset, epochs: usize) -> Vec<Batch> {
    let options = BatchOptions {
        batch_size: 3,
        max_seq_length: 32,
        packing: true,
        seed: 4,
        shuffle: true,
        ..BatchOptions::default()
    };
    let batcher = Batcher::new(Arc::new(dataset), options).unwrap();
    (0..epochs)
        .flat_map(|epoch| batcher.epoch(epoch))
        .map(|plan| batcher.batch(&plan).unwrap())
        .collect()
}

#[test]
fn tokens_in_a_file_give_the_batches_of_those_in_memory() {
    let place = tempfile::tempdir().unwrap();
    let lines = conversations(0..90);
    let (first, rest) = lines.split_at(lines.match_indices('\n').nth(40).unwrap().0 + 1);
    std::fs::write(place.path().join("train-0.jsonl"), first).unwrap();
    let mut second = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut second, rest.as_bytes()).unwrap();
    std::fs::write(place.path().join("train-1.jsonl.gz"), second.finish().unwrap()).unwrap();
    std::fs::write(place.path().join("whole"), &lines).unwrap();
    let files = DataFiles::find(place.path()).unwrap();
    let tokenizer = with_template("tokenizer", "chatml-generation");
    let spilled = tempfile::tempdir().unwrap();
    let options = |memory| DataOptions {
        max_seq_length: 32,
        memory,
        folder: spilled.path().to_path_buf(),
        ..options(None)
    };
    let read = |memory| {
        let files = files.require(Split::Train).unwrap();
        tokenize(&[source(files, None)], &tokenizer, &options(memory)).unwrap()
    };
    let records = read_records(&place.path().join("whole")).unwrap();
    let whole = Dataset::build(&records, &tokenizer, &options(u64::MAX)).unwrap();
    assert!(whole.report.truncated > 0 && whole.len() > 80, "{}", whole.report);
    let expected = batches(whole.clone(), 3);
    for memory in [0, 999, u64::MAX] {
        let dataset = read(memory).into_dataset().unwrap();
        assert_eq!((&dataset.report, dataset.fingerprint()), (&whole.report, whole.fingerprint()));
        assert_eq!(batches(dataset, 3), expected);
    }
    // What is held out is what was held out of the records, whether they become examples or not.
    let held_out = HeldOut { fraction: 0.2, seed: 7 };
    let (train, valid) = read(0).hold_out(held_out).unwrap();
    assert_eq!((train.report.records, valid.report.records), (72, 18));
    let mut all: Vec<Example> = train.iter().chain(valid.iter()).collect();
    let mut expected: Vec<Example> = whole.iter().collect();
    all.sort_by(|a, b| a.ids.cmp(&b.ids));
    expected.sort_by(|a, b| a.ids.cmp(&b.ids));
    assert_eq!(all, expected);
}

#[test]
fn sources_share_each_epoch_by_their_weights() {
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, range| {
        let path = place.path().join(name);
        std::fs::write(&path, conversations(range)).unwrap();
        path
    };
    let (small, large) = (write("small.jsonl", 0..10), write("large.jsonl", 100..190));
    let tokenizer = with_template("tokenizer", "chatml-generation");
    let build = |weights: [Option<f64>; 2]| {
        let sources = [
            source(std::slice::from_ref(&small), weights[0]),
            source(std::slice::from_ref(&large), weights[1]),
        ];
        tokenize(&sources, &tokenizer, &options(None))?.into_dataset()
    };
    let dataset = Arc::new(build([Some(0.3), Some(0.7)]).unwrap());
    assert_eq!(dataset.len(), 100);
    let batcher = |seed| {
        let options = BatchOptions {
            batch_size: 8,
            max_seq_length: 2048,
            packing: false,
            seed,
            shuffle: true,
            ..BatchOptions::default()
        };
        Batcher::new(dataset.clone(), options).unwrap()
    };
    let epoch = |seed, epoch| -> Vec<usize> {
        batcher(seed).epoch(epoch).into_iter().flat_map(|plan| plan.rows).flatten().collect()
    };
    let mut seen = [0; 100];
    for number in 0..9 {
        let indices = epoch(1, number);
        assert_eq!(indices.len(), 100);
        assert_eq!(batcher(1).batch_count(number), 13);
        assert_eq!(indices.iter().filter(|index| **index < 10).count(), 30);
        indices.iter().for_each(|index| seen[*index] += 1);
        assert_eq!(indices, epoch(1, number));
        assert_ne!(indices, epoch(2, number));
    }
    // 9 epochs of 30 and of 70 are 27 passes of the small source and 7 of the large one.
    assert_eq!((&seen[..10], &seen[10..]), (&[27; 10][..], &[7; 90][..]));

    // Without weights, sources are one after the other, as one file would be.
    let joined = build([None, None]).unwrap();
    let mut records = read_records(&small).unwrap();
    records.extend(read_records(&large).unwrap());
    let one = Dataset::build(&records, &tokenizer, &options(None)).unwrap();
    assert_eq!(joined.fingerprint(), one.fingerprint());
    assert_ne!(dataset.fingerprint(), one.fingerprint());
    let error = |weights| build(weights).unwrap_err().to_string();
    assert!(error([Some(1.0), None]).contains("give each a weight, or none"));
    assert!(error([Some(1.0), Some(0.0)]).contains("is 0, expected a positive number"));
    assert!(error([Some(1.0), Some(1e-9)]).contains("less than one of the 100 examples"));
}

#[test]
fn a_text_file_is_learned_to_its_end() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("book.txt");
    let text: String = (0..400).map(|line| format!("Line {line}: 東京 🙂 and so on.\n")).collect();
    std::fs::write(&path, &text).unwrap();
    for name in ["tokenizer", "tokenizer-sp"] {
        let tokenizer = without_template(name);
        let options = DataOptions { max_seq_length: 61, ..options(None) };
        let dataset = tokenize(&[source(std::slice::from_ref(&path), None)], &tokenizer, &options)
            .unwrap()
            .into_dataset()
            .unwrap();
        assert_eq!((dataset.report.truncated, dataset.report.dropped_untrainable), (0, 0));
        assert!(dataset.len() > 100 && dataset.report.mean_length > 55.0, "{}", dataset.report);
        let decoded: String =
            dataset.iter().map(|example| tokenizer.decode(&example.ids, true).unwrap()).collect();
        assert!(decoded == text, "{name}: {decoded}");
        let last = dataset.get(dataset.len() - 1).unwrap();
        assert_eq!(last.ids.last().copied(), tokenizer.eos_id());
        let ends = dataset.iter().filter(|example| example.ids.last() == last.ids.last()).count();
        assert_eq!(ends, 1);
    }
}

#[test]
fn the_first_tokens_of_a_long_text_are_those_of_the_whole() {
    let mut random = SplitMix64::new(3);
    let words = [
        "a",
        " ",
        "   ",
        "\n\n",
        "東京",
        "🙂",
        "1234",
        "don't",
        "<|im_end|>",
        "</s>",
        "Ünï",
        "...",
        "\t",
    ];
    let texts: Vec<String> = (0..6)
        .map(|_| (0..20_000).map(|_| words[random.below(words.len() as u64) as usize]).collect())
        .chain([" ".repeat(60_000), "a".repeat(60_000), "ab ".repeat(20_000)])
        .collect();
    for name in ["tokenizer", "tokenizer-sp"] {
        let tokenizer = without_template(name);
        for text in &texts {
            let (ids, offsets) = tokenizer.encode_with_offsets(text, true).unwrap();
            for most in [2, 100, 700] {
                let (first, places) = tokenizer.encode_first(text, true, most).unwrap();
                assert!(first.len() >= most.min(ids.len()));
                let count = first.len();
                let same = first == ids[..count] && places == offsets[..count];
                assert!(same, "{name}, {most}: {}", &text[..40]);
            }
        }
    }
}

#[test]
fn a_line_of_megabytes_costs_what_is_kept_of_it() {
    let tokenizer = with_template("tokenizer", "chatml-generation");
    let long = "many words ".repeat(2 << 20);
    let options = DataOptions { max_seq_length: 128, ..options(None) };
    let records = [chat(&[("user", "go on"), ("assistant", &long)]), text(&long)];
    let dataset = Dataset::build(&records, &tokenizer, &options).unwrap();
    assert_eq!((dataset.report.truncated, dataset.report.tokens), (2, 256));
}

#[test]
fn records_of_share_gpt_and_alpaca_are_learned() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a.jsonl");
    let record = |value: Value| {
        std::fs::write(&path, value.to_string()).unwrap();
        read_records(&path).unwrap().remove(0)
    };
    let tokenizer = with_template("tokenizer", "chatml-generation");
    let (runs, whole) = learned(
        &tokenizer,
        record(json!({"system": "Short.", "conversations": [
            {"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"},
            {"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2"},
        ]})),
        None,
    );
    assert_eq!(runs, ["1<|im_end|>", "2<|im_end|>"]);
    assert!(
        whole.starts_with("<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nOne?"),
        "{whole}"
    );

    let alpaca =
        json!({"instruction": "Add.", "input": "1, 1", "output": "2", "text": "all of it"});
    let (runs, whole) = learned(&tokenizer, record(alpaca.clone()), None);
    assert_eq!(runs, ["2<|im_end|>"]);
    assert!(whole.contains("user\nAdd.\n\n1, 1<|im_end|>"), "{whole}");
    let (runs, whole) = learned(&without_template("tokenizer"), record(alpaca), None);
    assert_eq!(runs, ["2<|im_end|>"]);
    assert!(
        whole.contains("### Instruction:\nAdd.\n\n### Input:\n1, 1\n\n### Response:\n2"),
        "{whole}"
    );
    let with_history = json!({"instruction": "Two?", "output": "2", "history": [["One?", "1"]]});
    assert_eq!(learned(&tokenizer, record(with_history.clone()), None).0, ["2<|im_end|>"]);
    let all_turns = learned(&tokenizer, record(with_history), Some(LossOn::Assistant)).0;
    assert_eq!(all_turns, ["1<|im_end|>", "2<|im_end|>"]);
    let dolly = json!({"instruction": "Say", "context": "", "response": "yes", "category": "qa"});
    assert_eq!(learned(&tokenizer, record(dolly), None).0, ["yes<|im_end|>"]);

    let weighted = json!({"messages": [
        {"role": "user", "content": "One?"}, {"role": "assistant", "content": "1", "weight": 0},
        {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2", "weight": 1},
    ]});
    for template in ["chatml-generation", "chatml"] {
        let tokenizer = with_template("tokenizer", template);
        assert_eq!(learned(&tokenizer, record(weighted.clone()), None).0, ["2<|im_end|>"]);
    }
}

#[test]
fn columns_are_taken_from_where_they_are_named() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a.csv");
    std::fs::write(&path, "question,context,answer\nWhy?,It rains.,Rain\nHow?,,\n").unwrap();
    let tokenizer = without_template("tokenizer");
    let build = |columns: Columns| {
        let source = DataSource { columns, ..DataSource::new([path.clone()]) };
        tokenize(&[source], &tokenizer, &options(None))?.into_dataset()
    };
    let template = Template::parse("prompt_template", r"Q: {question}\nC: {context}\nA: ").unwrap();
    let columns = Columns {
        prompt: Some(Source::Template(template)),
        completion: Some(Source::Key("answer".into())),
        ..Columns::default()
    };
    let dataset = build(columns.clone()).unwrap();
    // The row without an answer holds nothing to learn.
    assert_eq!((dataset.report.records, dataset.report.dropped_empty, dataset.len()), (2, 1, 1));
    let text = tokenizer.decode(&dataset.get(0).unwrap().ids, true).unwrap();
    assert_eq!(text, "Q: Why?\nC: It rains.\nA: Rain");
    let error = |columns| build(columns).unwrap_err().to_string();
    let message = error(Columns::default());
    assert!(
        message.contains("a.csv:2: ")
            && message.contains("prompt_column: question and completion_column: answer"),
        "{message}"
    );
    let message = error(Columns { completion: Some(Source::Key("reply".into())), ..columns });
    assert!(message.contains("a.csv:2: there is no column \"reply\""), "{message}");
}

#[test]
fn a_part_of_a_source_is_the_records_that_it_names() {
    let place = tempfile::tempdir().unwrap();
    let files: Vec<_> = [0..40, 40..100]
        .into_iter()
        .enumerate()
        .map(|(index, range)| {
            let path = place.path().join(format!("{index}.jsonl"));
            std::fs::write(&path, conversations(range)).unwrap();
            path
        })
        .collect();
    let tokenizer = with_template("tokenizer", "chatml-generation");
    let read = |text: &str| {
        let (_, slice) = Slice::parse("split", text).unwrap();
        let source = DataSource { slice, ..DataSource::new(files.clone()) };
        tokenize(&[source], &tokenizer, &options(None))?.into_dataset()
    };
    let whole: Vec<Example> = read("train").unwrap().iter().collect();
    assert_eq!(whole.len(), 100);
    for (text, expected) in [
        ("train[:10]", 0..10),
        ("train[35:45]", 35..45),
        ("train[-3:]", 97..100),
        ("train[:80%]", 0..80),
        ("train[90:]", 90..100),
        ("train[:1000]", 0..100),
    ] {
        let part: Vec<Example> = read(text).unwrap().iter().collect();
        assert!(part == whole[expected], "{text}");
    }
    let message = read("train[100:]").unwrap_err().to_string();
    assert!(message.contains("[100:] holds none of the 100 records"), "{message}");
}

#[test]
fn a_survey_counts_what_training_makes_of_the_records() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a.jsonl");
    let pair = |prompt: &str, completion: &str| {
        format!("{}\n", json!({"prompt": prompt, "completion": completion, "id": 3}))
    };
    let long = "word ".repeat(50);
    let lines = [
        pair("One?", "1"),
        pair("Two?", "2"),
        pair("One?", "1"),
        pair("Nothing", ""),
        pair("Long", &long),
        pair(&long, "never reached"),
    ];
    std::fs::write(&path, lines.concat()).unwrap();
    let tokenizer = with_template("tokenizer", "chatml-generation");
    let options = DataOptions { max_seq_length: 40, ..options(None) };
    let sources = [DataSource::new([path.clone()])];
    let context = Some(45);
    let tokens = Reading::Tokens { tokenizer: &tokenizer, options: &options, context };
    let (found, record) = survey(&sources, tokens, Some(4)).unwrap();
    let report = tokenize(&sources, &tokenizer, &options).unwrap().into_dataset().unwrap().report;
    let counts = found.tokens.unwrap();
    assert_eq!((found.records, found.duplicates, found.empty), (6, 1, 1));
    assert_eq!((counts.cut, counts.beyond_context), (report.truncated, Some(2)));
    assert_eq!(counts.learned, report.trainable_tokens as u64);
    assert_eq!(counts.nothing_learned, report.dropped_empty + report.dropped_untrainable);
    let lengths = found.lengths.unwrap();
    assert!(lengths.min == lengths.median && lengths.p95 == lengths.max && lengths.max > 60);
    let dropped = counts.cut_tokens + report.tokens as u64 + 40;
    assert_eq!(lengths.total, dropped, "the record that is dropped has 40 tokens when it is cut");

    let shown = Shown::new(&record.unwrap(), &tokenizer, &options).unwrap();
    assert_eq!((shown.tokens - shown.cut, shown.learned > 20), (40, true));
    let texts: Vec<_> = shown.pieces.iter().map(|piece| piece.text.as_str()).collect();
    assert_eq!(texts[0], "<|im_start|>user\nLong<|im_end|>\n<|im_start|>assistant\n");
    assert!(texts.len() == 2 && long.starts_with(texts[1]), "{texts:?}");
    let (_, record) = survey(&sources, tokens, Some(0)).unwrap();
    let shown = Shown::new(&record.unwrap(), &tokenizer, &options).unwrap();
    let learned: Vec<_> = shown.pieces.iter().map(|piece| piece.learned).collect();
    assert_eq!((shown.pieces[1].text.as_str(), learned), ("1<|im_end|>", vec![false, true, false]));

    let (found, record) = survey(&sources, Reading::Characters, Some(6)).unwrap();
    assert_eq!((found.lengths.unwrap().min, found.tokens, record), (5, None, None));
    let described = describe(&path, &Columns::default()).unwrap().unwrap();
    assert_eq!((described.format, described.compression), ("JSON Lines", None));
    assert_eq!(described.taken, ["prompt", "completion"]);
    assert_eq!(described.passed_over, ["id"]);
}

#[test]
fn a_survey_of_a_text_file_counts_its_examples() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("book.txt");
    std::fs::write(&path, "A line of text. ".repeat(100)).unwrap();
    let tokenizer = without_template("tokenizer-sp");
    let options = DataOptions { max_seq_length: 50, ..options(None) };
    let tokens = Reading::Tokens { tokenizer: &tokenizer, options: &options, context: None };
    let sources = [DataSource::new([path])];
    let (found, record) = survey(&sources, tokens, Some(0)).unwrap();
    let report = tokenize(&sources, &tokenizer, &options).unwrap().into_dataset().unwrap().report;
    assert_eq!((found.records, found.tokens.unwrap().cut), (report.records, 0));
    assert_eq!(found.lengths.unwrap().total, report.tokens as u64);
    let shown = Shown::new(&record.unwrap(), &tokenizer, &options).unwrap();
    assert!(shown.tokens == 50 && shown.pieces[0].text.contains("A line of text."), "{shown:?}");
}

#[test]
fn every_token_and_mask_counts_for_the_fingerprint() {
    let dataset = |change: &dyn Fn(&mut Vec<Example>)| {
        let mut examples: Vec<Example> = (0..3u32)
            .map(|n| Example { ids: (n..n + 500).collect(), trainable: vec![true; 500] })
            .collect();
        change(&mut examples);
        Dataset::from_examples(&examples).unwrap().fingerprint()
    };
    let same = dataset(&|_| ());
    assert_eq!(dataset(&|_| ()), same);
    type Change = &'static dyn Fn(&mut Vec<Example>);
    let changes: [(&str, Change); 5] = [
        ("a token", &|all| all[2].ids[499] = 0),
        ("a mask", &|all| all[1].trainable[257] = false),
        ("the order", &|all| all.swap(0, 1)),
        ("an example less", &|all| drop(all.pop())),
        ("where an example ends", &|all| {
            let id = all[1].ids.remove(0);
            let trainable = all[1].trainable.remove(0);
            all[0].ids.push(id);
            all[0].trainable.push(trainable);
        }),
    ];
    for (what, change) in changes {
        assert_ne!(dataset(change), same, "{what}");
    }
}
