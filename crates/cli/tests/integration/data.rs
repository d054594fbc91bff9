//! Data as people have it: columns, mixtures, chat templates, and what `data` says of it all.

use crate::common::{Place, text};
use serde_json::Value;

const COLUMNS: [&str; 4] =
    ["--prompt-column", "Q: {question} ({topic})", "--completion-column", "answer"];

/// A place with a model and a table whose columns have names of their own.
fn with_table() -> Place {
    let place = Place::with_model();
    let rows = (0..6).map(|n| format!("What is {n}?,numbers,\"A number, {n}.\"\n"));
    place.write("table.csv", &("question,topic,answer\n".to_string() + &rows.collect::<String>()));
    place
}

fn train<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["train", "-m", "base", "--steps", "4", "--report-every", "1", "-q"], more].concat()
}

fn plan(place: &Place, more: &[&str]) -> Value {
    place.json(&[&["train", "-m", "base", "--dry-run", "--json"], more].concat())
}

fn losses(place: &Place, run: &str) -> Vec<Value> {
    let metrics = place.read(&format!("{run}/metrics.jsonl"));
    let events = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let losses: Vec<_> = events
        .filter(|event| event["event"] == "train")
        .map(|event| event["loss"].clone())
        .collect();
    assert!(!losses.is_empty(), "{metrics}");
    losses
}

#[test]
fn columns_are_named_by_flags_and_keys() {
    let place = with_table();
    let flags = plan(&place, &[&["-d", "table.csv"], &COLUMNS[..]].concat());
    assert_eq!(flags["data"]["train"]["examples"], 6);
    place.write(
        "words.yaml",
        "model: base\ndata: table.csv\nprompt_feature: 'Q: {question} ({topic})'\ncompletion_feature: answer\n",
    );
    let words = place.json(&["train", "-c", "words.yaml", "--dry-run", "--json"]);
    let tokens = |plan: &Value| plan["data"]["train"]["tokens"].as_u64().unwrap();
    assert_eq!(tokens(&words), tokens(&flags));
    place.write(
        "run.yaml",
        "model: base\ndata:\n- path: table.csv\n  prompt_column: 'Q: {question} ({topic})'\n  \
         completion_column: answer\n- data\n",
    );
    let file = place.json(&["train", "-c", "run.yaml", "--dry-run", "--json"]);
    assert_eq!(file["data"]["train"]["examples"], 18);
    assert!(tokens(&file) > tokens(&flags), "{file}");

    let stderr = place.fails(1, &["train", "-m", "base", "-d", "table.csv", "--dry-run"]);
    assert!(
        stderr.contains("table.csv:2: the record has the keys \"question\", \"topic\", \"answer\"")
            && stderr.contains("prompt_column: question and completion_column: answer"),
        "{stderr}"
    );
    for (columns, code, expected) in [
        (
            &["--prompt-column", "query"][..],
            1,
            "table.csv:2: there is no column \"query\"; the record has",
        ),
        (&["--text-column", "{answer"], 2, "text_column: a { has no } in `{answer`"),
        (
            &["--text-column", "answer", "--prompt-column", "question"],
            2,
            "columns: a record is taken from a prompt and a completion, from a text, or from messages",
        ),
    ] {
        let arguments =
            [&["train", "-m", "base", "-d", "table.csv", "--dry-run"], columns].concat();
        let stderr = place.fails(code, &arguments);
        assert!(stderr.contains(expected), "{columns:?}: {stderr}");
    }
    let texts = plan(&place, &["-d", "table.csv", "--text-column", "answer"]);
    assert_eq!(texts["data"]["train"]["examples"], 6);
}

#[test]
fn sources_share_an_epoch_by_their_weights() {
    let place = with_table();
    // What exists by its whole name is a path, whatever it ends with.
    let rows = (0..12).map(|n| {
        format!("{{\"question\": \"{n}?\", \"topic\": \"other\", \"answer\": \"{n}.\"}}\n")
    });
    place.write("data:9", &rows.collect::<String>());
    fn mixed<'a>(more: &[&'a str]) -> Vec<&'a str> {
        [&["-d", "table.csv:3", "-d", "data:9"][..], &COLUMNS, more].concat()
    }
    let planned = plan(&place, &mixed(&[]));
    let expected = serde_json::json!([{"path": "table.csv", "weight": 3.0}, "data:9"]);
    assert_eq!(planned["settings"]["data"], expected);
    assert_eq!(planned["data"]["train"]["examples"], 18);
    let output = place.run(&[&["train", "-m", "base", "--dry-run"], &mixed(&[])[..]].concat());
    let shown = text(&output.stdout);
    assert!(shown.contains("an epoch is 75.0 % of table.csv, 25.0 % of data:9"), "{shown}");

    // The columns hold for every source that names none.
    let stderr = place.fails(1, &train(&mixed(&["-d", "data", "-o", "no"])));
    assert!(stderr.contains("train.jsonl:1: there is no column \"question\""), "{stderr}");
    let file = |weight: f64| {
        place.write(
            "run.yaml",
            &format!(
                "model: base\nsteps: 4\nreport_every: 1\nsave_every: 2\ndata:\n- path: table.csv\n  weight: {weight}\n  \
                 prompt_column: '{{question}}'\n  completion_column: answer\n- data\n"
            ),
        );
    };
    file(3.0);
    let run = |output: &str| place.ok(&["train", "-c", "run.yaml", "-q", "-o", output]);
    run("one");
    run("two");
    assert_eq!(losses(&place, "one"), losses(&place, "two"));
    file(1.0);
    run("three");
    assert_ne!(losses(&place, "one"), losses(&place, "three"));
    let stderr =
        place.fails(1, &["train", "-c", "run.yaml", "-q", "--resume", "-o", "one", "--steps", "6"]);
    assert!(stderr.contains("the training data are not"), "{stderr}");
    // Without the file, the run goes on as it began.
    place.ok(&["train", "-q", "--resume", "-o", "one", "--steps", "6"]);

    for (data, expected) in [
        (
            &["-d", "table.csv:0", "-d", "data"][..],
            "data: the weight of table.csv is 0, expected a positive number",
        ),
        (&["-d", "table.csv:-1", "-d", "data"], "data: the weight of table.csv is -1"),
    ] {
        let stderr = place.fails(2, &[&["train", "-m", "base", "--dry-run"], data].concat());
        assert!(stderr.contains(expected), "{stderr}");
    }
    let stderr = place.fails(2, &["evaluate", "-m", "base", "-d", "data/test.jsonl:2"]);
    assert!(stderr.contains("weights are for training"), "{stderr}");
}

#[test]
fn several_sources_are_measured_together() {
    let place = with_table();
    let evaluate = |data: &[&str]| {
        let arguments = [&["evaluate", "-m", "base", "--json"], data].concat();
        place.json(&arguments)["data"]["examples"].as_u64().unwrap()
    };
    assert_eq!(evaluate(&["-d", "data", "-d", "data/train.jsonl"]), 15);
    assert_eq!(evaluate(&["-d", "data", "--split", "valid"]), 3);
    assert_eq!(evaluate(&[&["-d", "table.csv"], &COLUMNS[..]].concat()), 6);
    let stderr = place.fails(2, &["evaluate", "-m", "base", "-d", "table.csv", "--split", "test"]);
    assert!(stderr.contains("split: table.csv is one file"), "{stderr}");
}

/// A hub's data set with numbered questions, 20 to learn from and 5 for validation.
fn hub() -> String {
    let lines = |range: std::ops::Range<u32>| {
        range.map(|n| format!("{{\"q\": \"What is {n}?\", \"a\": \"{n}\"}}\n")).collect::<String>()
    };
    crate::common::hub(vec![
        ("train.jsonl".into(), lines(0..20)),
        ("validation.jsonl".into(), lines(20..25)),
    ])
}

fn online(place: &Place, address: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = place.command(arguments);
    command.env("HF_HUB_OFFLINE", "0").env("HF_ENDPOINT", address);
    let output = command.output().unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn data_sets_of_the_hub_are_sources_like_others() {
    let place = Place::with_model();
    let address = hub();
    let columns = ["--prompt-column", "q", "--completion-column", "a"];
    let run = |arguments: &[&str]| {
        let (code, stdout, stderr) = online(&place, &address, arguments);
        assert_eq!(code, Some(0), "{arguments:?}: {stderr}");
        serde_json::from_str::<Value>(&stdout).unwrap()
    };
    let dry = ["train", "-m", "base", "--dry-run", "--json"];
    place.write("own.jsonl", "{\"q\": \"Own?\", \"a\": \"Yes.\"}\n");
    let planned =
        run(&[&dry[..], &["-d", "own.jsonl:1", "-d", "owner/name:20"], &columns].concat());
    let data = &planned["data"];
    assert_eq!((&data["train"]["examples"], &data["valid"]["examples"]), (&21.into(), &5.into()));
    let part = ["-d", "owner/name", "--data-split", "train[5:15]"];
    let planned = run(&[&dry[..], &part, &columns].concat());
    assert_eq!(planned["data"]["train"]["examples"], 10);

    // As mlx-lm has it.
    place.write(
        "mlx.yaml",
        "model: base\niters: 2\nhf_dataset:\n  path: owner/name\n  prompt_feature: q\n  completion_feature: a\n",
    );
    let planned = run(&["train", "-c", "mlx.yaml", "--dry-run", "--json"]);
    let data = &planned["data"];
    assert_eq!((&data["train"]["examples"], &data["valid"]["examples"]), (&16.into(), &2.into()));
    assert_eq!(planned["settings"]["loss_on"], "all");

    let evaluate = ["evaluate", "-m", "base", "--json", "-d", "owner/name"];
    assert_eq!(run(&[&evaluate[..], &columns].concat())["data"]["examples"], 5);
    let train_split = [&evaluate[..], &columns, &["--split", "train"]].concat();
    assert_eq!(run(&train_split)["data"]["examples"], 20);
    let part = [&evaluate[..], &columns, &["--data-split", "train[-3:]"]].concat();
    assert_eq!(run(&part)["data"]["examples"], 3);

    let shown = run(&[&["data", "owner/name", "--json"], &columns[..]].concat());
    let splits: Vec<_> =
        shown["splits"].as_array().unwrap().iter().map(|split| &split["split"]).collect();
    assert_eq!(splits, ["train", "validation"]);

    let several =
        [&dry[..], &["-d", "owner/name", "-d", "owner/other", "--data-split", "x"]].concat();
    let (code, _, stderr) = online(&place, &address, &several);
    assert_eq!(code, Some(2));
    assert!(
        stderr.contains(
            "data_split: there are several data sets of the hub, owner/name and owner/other"
        ),
        "{stderr}"
    );
    let (code, _, stderr) = online(
        &place,
        &address,
        &[&dry[..], &["-d", "owner/name", "--data-split", "train[x]"]].concat(),
    );
    assert_eq!(code, Some(1));
    assert!(
        stderr.contains("data_split: is train[x], expected a split and a part of it"),
        "{stderr}"
    );
}

/// A template that writes what it is told, and that marks nothing.
const TEMPLATE: &str = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|im_end|>{% endfor %}\
                        {% if add_generation_prompt %}<assistant>{% if loud %}!{% endif %}{% endif %}\n";

#[test]
fn the_chat_template_of_training_is_used_with_what_was_trained() {
    let place = Place::with_model();
    place.write("own.jinja", TEMPLATE);
    let given = ["-d", "data", "--chat-template", "own.jinja"];
    place.ok(&train(&[&given[..], &["-o", "tuned", "--save-every", "2"]].concat()));
    assert_eq!(place.read("tuned/chat_template.jinja"), TEMPLATE);
    assert_eq!(place.read("tuned/checkpoints/step-00000002/chat_template.jinja"), TEMPLATE);
    place.ok(&train(&["-d", "data", "-o", "usual"]));
    assert!(!place.path("usual/chat_template.jinja").exists());
    assert_ne!(losses(&place, "tuned"), losses(&place, "usual"));

    // The run goes on without the file, and not with another template.
    std::fs::remove_file(place.path("own.jinja")).unwrap();
    let stderr = place.fails(
        1,
        &[
            "train",
            "--resume",
            "-o",
            "tuned",
            "-q",
            "--steps",
            "6",
            "--chat-template",
            "{{ messages }}",
        ],
    );
    assert!(stderr.contains("the chat template is not"), "{stderr}");
    place.ok(&["train", "--resume", "-o", "tuned", "-q", "--steps", "6"]);

    let tokens = |arguments: &[&str]| {
        let generate = ["generate", "-p", "Hi", "-t", "0", "-n", "1", "--json"];
        place.json(&[&generate[..], arguments].concat())["prompt_tokens"].as_u64().unwrap()
    };
    let own = tokens(&["-m", "base", "--chat-template", TEMPLATE]);
    assert_ne!(own, tokens(&["-m", "base"]));
    assert_eq!(own, tokens(&["-a", "tuned"]));
    assert_eq!(own + 1, tokens(&["-a", "tuned", "--chat-template-kwargs", "{\"loud\": true}"]));
    place.ok(&["fuse", "-a", "tuned", "-o", "fused"]);
    assert_eq!(place.read("fused/chat_template.jinja"), TEMPLATE);
    assert_eq!(own, tokens(&["-m", "fused"]));
    let evaluate = |arguments: &[&str]| {
        let all = [&["evaluate", "-d", "data", "--json"], arguments].concat();
        place.json(&all)["data"]["tokens"].as_u64().unwrap()
    };
    assert_eq!(evaluate(&["-a", "tuned"]), evaluate(&["-m", "base", "--chat-template", TEMPLATE]));
    assert_ne!(evaluate(&["-a", "tuned"]), evaluate(&["-m", "base"]));

    // What starts from the adapter keeps its template; what takes its folder does not.
    place.ok(&train(&["-d", "data", "--init-adapter", "tuned", "-o", "more"]));
    assert_eq!(place.read("more/chat_template.jinja"), TEMPLATE);
    place.ok(&train(&["-d", "data", "-o", "more", "--overwrite"]));
    assert!(!place.path("more/chat_template.jinja").exists());
    // A whole model has it in place of its own.
    let full = ["--fine-tune-type", "full", "-o", "whole", "--chat-template", TEMPLATE];
    place.ok(&train(&[&["-d", "data"], &full[..]].concat()));
    assert_eq!(own, tokens(&["-m", "whole"]));
    // A run that takes its folder takes nothing that was copied there.
    assert!(place.path("whole/tokenizer.json").exists());
    place.ok(&train(&["-d", "data", "-o", "whole", "--overwrite"]));
    assert!(!place.path("whole/tokenizer.json").exists());

    // Fusing keeps what stands beside the base's weights, but for templates where the adapter has one.
    let beside = [
        ("chat_template.json", "{\"chat_template\": \"a\"}\r\n"),
        ("additional_chat_templates/default.jinja", "b\r\n"),
        ("additional_chat_templates/tool_use.jinja", "c"),
        ("vocab.json", "{}"),
    ];
    for (name, content) in beside {
        place.write(&format!("base/{name}"), content);
    }
    place.ok(&["fuse", "-a", "usual", "-o", "kept"]);
    place.ok(&["fuse", "-a", "tuned", "-o", "fused-again"]);
    for (name, content) in beside {
        assert_eq!(place.read(&format!("kept/{name}")), content, "{name}");
        assert_eq!(place.path(&format!("fused-again/{name}")).exists(), name == "vocab.json");
    }
    assert_eq!(own, tokens(&["-m", "fused-again"]));
}

#[test]
fn mistakes_about_the_chat_template_are_named() {
    let place = Place::with_model();
    place.write("broken.jinja", "\n{% if %}");
    let chat =
        |flags: &[&str]| place.fails(2, &[&["generate", "-m", "base", "-p", "x"], flags].concat());
    for (flags, expected) in [
        (&["--chat-template", "none.jinja"][..], "chat_template: there is no file none.jinja"),
        (&["--chat-template", "broken.jinja"], "chat_template: line 2: "),
        (
            &["--chat-template-kwargs", "{x"],
            "--chat-template-kwargs: is {x, expected a JSON object such as",
        ),
        (
            &["--chat-template-kwargs", "[1]"],
            "--chat-template-kwargs: is [1], expected a JSON object such as",
        ),
        (
            &["--chat-template-kwargs", "{\"enable_thinkin\": false}"],
            "chat_template_kwargs: the chat template has no enable_thinkin",
        ),
        (
            &["--chat-template-kwargs", "{\"messages\": []}"],
            "chat_template_kwargs: messages is set by this program",
        ),
    ] {
        let stderr = chat(flags);
        assert!(stderr.contains(expected), "{flags:?}: {stderr}");
    }
    let stderr = place.fails(2, &train(&["-d", "data", "--chat-template-kwargs", "{\"loud\": 1}"]));
    assert!(stderr.contains("the chat template has no loud"), "{stderr}");
    for (key, flags) in [
        ("chat_template", ["--chat-template", TEMPLATE]),
        ("chat_template_kwargs", ["--chat-template-kwargs", "{\"loud\": 1}"]),
        ("max_seq_length", ["--max-seq-length", "5"]),
        ("loss_on", ["--loss-on", "all"]),
    ] {
        let stderr = place.fails(2, &[&["data", "data"], &flags[..]].concat());
        assert!(stderr.contains(&format!("{key}: needs a tokenizer; give --model")), "{stderr}");
    }
}

#[test]
fn records_beyond_the_models_context_are_told_of() {
    let place = Place::with_model();
    let warned = |arguments: &[&str]| {
        let dry = ["train", "-m", "base", "-d", "data", "--dry-run", "--json"];
        let output = place.run(&[&dry[..], arguments].concat());
        let plan: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
        let warnings: Vec<String> = serde_json::from_value(plan["warnings"].clone()).unwrap();
        for warning in &warnings {
            assert!(text(&output.stderr).contains(warning.as_str()));
        }
        warnings.join("\n")
    };
    assert_eq!(warned(&[]), "");
    assert!(
        warned(&["--max-seq-length", "4000"])
            .starts_with("max_seq_length: is 4000, and this model was made for 256")
    );
    let long = format!("{{\"text\": \"{}\"}}\n", "many words ".repeat(200));
    place.write("data/train.jsonl", &(place.read("data/train.jsonl") + &long));
    let warning = warned(&[]);
    assert!(
        warning.starts_with(
            "in the training data 1 example is longer than the 256 tokens that this model"
        ) && warning.contains("--max-seq-length 256 cuts them there"),
        "{warning}"
    );
    assert_eq!(warned(&["--max-seq-length", "256"]), "");
    let output = place.run(&["evaluate", "-m", "base", "-d", "data", "--split", "train"]);
    assert!(text(&output.stderr).contains("1 example is longer than the 256 tokens"), "{output:?}");
}

#[test]
fn data_says_what_the_demo_learns_from() {
    let place = Place::new();
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/demo");
    let (data, model) = (format!("{demo}/instructions"), format!("{demo}/base"));
    let shown = place.json(&["data", &data, "--model", &model, "--record", "2", "--json"]);
    let plan = place.json(&["train", "-m", &model, "-d", &data, "--test", "--dry-run", "--json"]);
    for (split, name) in shown["splits"].as_array().unwrap().iter().zip(["train", "valid", "test"])
    {
        let report = &plan["data"][name];
        assert_eq!(split["split"], name);
        assert_eq!(split["records"], report["records"]);
        assert_eq!(split["lengths"]["total"], report["tokens"]);
        assert_eq!(split["lengths"]["max"], report["longest"]);
        assert_eq!(split["tokens"]["learned"], report["trainable_tokens"]);
        assert_eq!(split["tokens"]["cut"], 0);
    }
    assert_eq!((&shown["unit"], &shown["context"]), (&"tokens".into(), &256.into()));
    let file = &shown["files"][0];
    assert_eq!(
        (&file["format"], &file["taken"]),
        (&"JSON Lines".into(), &serde_json::json!(["messages"]))
    );
    assert_eq!(file["passed_over"], serde_json::json!(["topic"]));
    let record = &shown["record"];
    assert_eq!((&record["number"], &record["line"]), (&2.into(), &2.into()));
    let learned: Vec<&Value> = record["pieces"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|piece| piece["learned"] == true)
        .map(|piece| &piece["text"])
        .collect();
    assert_eq!(learned, ["It is blue.<|im_end|>"]);

    let piped = place.ok(&["data", &data, "--model", &model]);
    for part in [
        "train.jsonl, JSON Lines, conversations (messages with role and content); taken: messages; passed over: topic",
        "Records          417: 417 conversations",
        "⟦It is 11.<|im_end|>⟧",
        "none is longer than the 256 tokens",
    ] {
        assert!(piped.contains(part), "{part}: {piped}");
    }
    let forced =
        place.command(&["data", &data, "-m", &model]).env("CLICOLOR_FORCE", "1").output().unwrap();
    let forced = text(&forced.stdout);
    assert!(
        forced.contains("\u{1b}[32mIt is 11.<|im_end|>\n\u{1b}[0m")
            || forced.contains("\u{1b}[32mIt is 11.<|im_end|>\u{1b}[0m"),
        "{forced:?}"
    );
    assert!(!forced.contains('⟦'), "{forced}");

    let test = place.json(&["data", &format!("{data}/test.jsonl"), "--json"]);
    assert_eq!(
        (&test["splits"][0]["split"], &test["unit"]),
        (&"test".into(), &"characters".into())
    );
    let plain = place.ok(&["data", &data]);
    assert!(
        plain.contains("characters; of a record min") && plain.contains("not counted; --model"),
        "{plain}"
    );
    assert!(plain.contains("user: Please name the smaller of 11 and 18."), "{plain}");
}

#[test]
fn data_counts_what_is_not_as_it_should_be() {
    let place = Place::with_model();
    let one = "{\"prompt\": \"One?\", \"completion\": \"1\"}\n";
    let long = format!("{{\"prompt\": \"{}\", \"completion\": \"never\"}}\n", "word ".repeat(300));
    let orders = "{\"prompt\": \"\\u001b[31mred\", \"completion\": \"\\u001b[0m\"}\n";
    let empty = "{\"prompt\": \"Nothing\", \"completion\": \"\"}\n";
    place.write("a.jsonl", &[orders, one, one, empty, &long].concat());
    let data = ["data", "a.jsonl", "-m", "base", "--max-seq-length", "100"];
    let shown = place.json(&[&data[..], &["--json"]].concat());
    let split = &shown["splits"][0];
    assert_eq!(
        (&split["records"], &split["duplicates"], &split["empty"]),
        (&5.into(), &1.into(), &1.into())
    );
    let tokens = &split["tokens"];
    assert_eq!((&tokens["cut"], &tokens["beyond_context"]), (&1.into(), &1.into()));
    assert_eq!(tokens["nothing_learned"], 2);
    let piped = place.ok(&data);
    for part in [
        "1 record is the same as one before",
        "2 records are left out, 1 of them empty",
        "1 record is cut at --max-seq-length 100, by ",
        "1 record is longer than the 256 tokens",
        "\u{1b}[31mred",
    ] {
        assert!(piped.contains(part), "{part}: {piped}");
    }
    let cut = place.ok(&[&data[..], &["--record", "5"]].concat());
    assert!(cut.contains("tokens that are cut") && !cut.contains("never"), "{cut}");
    let empty = place.ok(&[&data[..], &["--record", "4"]].concat());
    assert!(empty.contains("it is left out"), "{empty}");
    let stderr = place.fails(2, &[&data[..], &["--record", "6"]].concat());
    assert!(stderr.contains("record: is 6, but the train data have 5 records"), "{stderr}");
    place.fails(2, &["data", "a.jsonl", "--record", "0"]);
    place.write("bad.jsonl", "{\"text\": \"a\"}\n{\"txt\": 1}\n");
    let stderr = place.fails(1, &["data", "bad.jsonl"]);
    assert!(stderr.contains("bad.jsonl:2: the record has the keys \"txt\""), "{stderr}");
}
