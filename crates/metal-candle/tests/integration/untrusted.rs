//! Files that nobody vouches for: whatever they hold, reading and using them ends, and ends in a result or an error.

use std::path::{Path, PathBuf};

use crate::common::isolated::isolated;
use metal_candle::model::{Config, Weights};
use metal_candle::text::{ChatTemplate, Message, RenderOptions, Tokenizer};
use serde_json::{Value, json};

fn fixtures() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures")).to_path_buf()
}

/// A copy of a fixture's folder.
fn copy_of(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixtures().join(name)).unwrap() {
        let from = entry.unwrap().path();
        if from.is_file() {
            std::fs::copy(&from, folder.path().join(from.file_name().unwrap())).unwrap();
        }
    }
    folder
}

/// A tokenizer's folder after a change of its `tokenizer.json`.
fn changed_tokenizer(name: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = copy_of(name);
    let path = folder.path().join("tokenizer.json");
    let mut file = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut file);
    std::fs::write(&path, file.to_string()).unwrap();
    folder
}

#[test]
fn what_tokenizers_panics_on_is_an_error_that_names_the_file() {
    let empty = json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"});
    let changes: [(&str, &str, Value); 6] = [
        ("tokenizer", "decoder", json!({"type": "WordPiece", "prefix": "##"})),
        ("tokenizer", "decoder", json!({"type": "Nothing", "a": 1})),
        ("tokenizer", "decoder", json!({"type": "ByteLevel", "add_prefix_space": 7})),
        ("tokenizer-sp", "normalizer", empty.clone()),
        ("tokenizer-sp", "decoder", empty.clone()),
        (
            "tokenizer-sp",
            "pre_tokenizer",
            json!({"type": "Split", "pattern": {"Regex": "(a+)+\\1$"}, "behavior": "Isolated", "invert": false}),
        ),
    ];
    let mut refused = 0;
    for (name, part, value) in changes {
        let folder = changed_tokenizer(name, |file| file[part] = value.clone());
        let used = Tokenizer::load(folder.path()).and_then(|tokenizer| {
            let ids =
                tokenizer.encode("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab, a text", true)?;
            tokenizer.decode(&ids, true)
        });
        if let Err(error) = used {
            refused += 1;
            let error = error.to_string();
            assert!(error.contains("tokenizer.json"), "{part} {value}: {error}");
            assert!(error.len() < 600, "{error}");
        }
    }
    assert!(refused >= 3, "{refused}");
}

#[test]
fn a_tokenizer_that_grows_a_text_without_bound_is_refused() {
    let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    for part in ["normalizer", "decoder"] {
        let list = if part == "normalizer" { "normalizers" } else { "decoders" };
        let folder = changed_tokenizer("tokenizer-sp", |file| {
            file[part] = json!({"type": "Sequence", list: vec![double.clone(); 60]});
        });
        let error = Tokenizer::load(folder.path()).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("times as long"), "{error}");
    }
}

#[test]
fn parts_nested_in_themselves_are_refused_at_once() {
    isolated("untrusted::parts_nested_in_themselves_are_refused_at_once", || {
        for depth in [5, 30, 60, 100_000] {
            let part = format!(
                "{}{{\"type\":\"Lowercase\"}}{}",
                "{\"type\":\"Sequence\",\"normalizers\":[".repeat(depth),
                "]}".repeat(depth)
            );
            let folder = copy_of("tokenizer");
            let path = folder.path().join("tokenizer.json");
            let text = std::fs::read_to_string(&path).unwrap();
            let text = text.replacen("\"normalizer\": null", &format!("\"normalizer\": {part}"), 1);
            assert!(text.contains("Lowercase"));
            std::fs::write(&path, text).unwrap();
            let loaded = Tokenizer::load(folder.path());
            assert_eq!(loaded.is_ok(), depth <= 5, "{depth}");
        }
    });
}

/// Makes a pipe that nobody writes to.
#[cfg(unix)]
fn make_pipe(path: &Path) {
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the name is a C string that lives through the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
}

#[cfg(unix)]
#[test]
fn a_pipe_in_the_place_of_a_models_file_is_refused_at_once() {
    isolated("untrusted::a_pipe_in_the_place_of_a_models_file_is_refused_at_once", || {
        for name in [
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "chat_template.jinja",
        ] {
            let folder = copy_of("models/llama");
            for file in ["tokenizer.json", "tokenizer_config.json"] {
                let from = fixtures().join("tokenizer").join(file);
                std::fs::copy(from, folder.path().join(file)).unwrap();
            }
            let path = folder.path().join(name);
            let _ = std::fs::remove_file(&path);
            make_pipe(&path);
            let error = Config::load(folder.path())
                .and_then(|_| Weights::open(folder.path()))
                .and_then(|_| Tokenizer::load(folder.path()))
                .unwrap_err()
                .to_string();
            assert!(error.contains(name) && error.contains("a pipe"), "{name}: {error}");
        }
    });
}

#[test]
fn a_file_that_is_something_else_is_called_what_it_is() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n";
    let archive = b"PK\x03\x04\0\0\0\0\0\0archive/data.pkl and more";
    let page = b"<!DOCTYPE html>\n<html><body>Sign in</body></html>";
    for (bytes, expected) in
        [(&pointer[..], "Git LFS"), (&archive[..], "zip archive"), (&page[..], "web page")]
    {
        let folder = copy_of("models/llama");
        std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        let error = Weights::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("model.safetensors") && error.contains(expected), "{error}");

        std::fs::write(folder.path().join("config.json"), bytes).unwrap();
        let error = Config::load(folder.path()).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains(expected), "{error}");

        let folder = copy_of("tokenizer");
        std::fs::write(folder.path().join("tokenizer.json"), bytes).unwrap();
        let error = Tokenizer::load(folder.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains(expected), "{error}");
    }
}

/// What a template makes of one message, on a stack as small as a thread has by default.
fn rendered(source: &str) -> Result<String, String> {
    let source = source.to_string();
    let render = move || {
        let template = ChatTemplate::new(&source, Vec::new(), Vec::new(), Vec::new())
            .map_err(|error| error.to_string())?;
        let messages = [Message::new("user", "What is there?\nAnd what is not?")];
        template.render(&messages, &RenderOptions::default()).map_err(|error| error.to_string())
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(render).unwrap().join().unwrap()
}

#[test]
fn templates_of_any_length_and_nesting_are_parsed_or_refused() {
    isolated("untrusted::templates_of_any_length_and_nesting_are_parsed_or_refused", || {
        // What stands at the start, again and again, and at the end.
        let chains = [
            ("{{ ", "not ", "1 }}"),
            ("{{ ", "1+", "1 }}"),
            ("{{ ", "'a'~", "'a' }}"),
            ("{{ ", "- ", "1 }}"),
            ("{{ ", "-", "1 }}"),
            ("{{ 1", "|string", " }}"),
            ("{{ 1", " is string", " }}"),
            ("{{ messages", ".a", " }}"),
            ("{{ messages", "[0]", " }}"),
            ("{{ messages", "()", " }}"),
            ("{{ messages", "[1:]", " }}"),
            ("{{ 1", " == 1", " }}"),
            ("{{ 1", " if 1", " }}"),
            ("{{ ", "1 if 1 else ", "1 }}"),
            ("{{ 1", " and 1", " }}"),
            ("{{ 2", " ** 1", " }}"),
            ("{{ ", "(", "1"),
            ("{{ ", "[", "1"),
            ("{{ ", "{'a':", "1"),
            ("{{ ", "f(", "1"),
            ("{{ 'a'", " 'a'", " }}"),
            ("", "{% if 1 %}", ""),
            ("{% if 1 %}", "{% elif 1 %}", "{% endif %}"),
            ("", "{% for a in [1] %}", ""),
            ("", "{% set a %}", ""),
            ("", "{% macro a() %}", ""),
            ("", "{% generation %}", "{% endgeneration %}"),
            ("", "{#", ""),
            ("", "{{ 1 }}", ""),
        ];
        for (start, again, end) in chains {
            for times in [100, 500, 2000, 4000, 8000, 100_000, 3_000_000 / again.len()] {
                eprintln!("{times} times {again:?}");
                let source = format!("{start}{}{end}", again.repeat(times));
                let outcome = rendered(&source);
                if times >= 100_000 {
                    let refusal = outcome.unwrap_err();
                    assert!(refusal.len() < 500, "{refusal}");
                }
            }
        }
        // The chains are not refused where people could write them.
        assert_eq!(rendered(&format!("{{{{ {}1 }}}}", "1+".repeat(1000))).unwrap(), "1001");
        assert_eq!(rendered(&format!("{{{{ 1{} }}}}", "|string".repeat(1000))).unwrap(), "1");
    });
}

#[test]
fn templates_that_would_never_end_or_fill_the_memory_are_stopped() {
    isolated("untrusted::templates_that_would_never_end_or_fill_the_memory_are_stopped", || {
        let doubled = |step: &str| format!("{{% set x = 'ab' %}}{}{{{{ x }}}}", step.repeat(60));
        let sources = [
            // Loops.
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}".to_string(),
            "{% for a in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}".into(),
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(),
            "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}".into(),
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}".into(),
            // Texts.
            doubled("{% set x = x ~ x %}"),
            doubled("{% set x = x + x %}"),
            doubled("{% set x = x * 2 %}"),
            doubled("{% set x = '%s%s'|format(x, x) %}"),
            doubled("{% set x = '{0}{0}'.format(x) %}"),
            doubled("{% set x = [x, x]|join %}"),
            doubled("{% set x = ''.join([x, x]) %}"),
            doubled("{% set x = x|replace('a', x) %}"),
            doubled("{% set x = x.replace('a', x) %}"),
            doubled("{% set x %}{{ x }}{{ x }}{% endset %}"),
            doubled("{% set x = x|escape ~ x|upper %}"),
            "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}".into(),
            "{% macro f(n) %}ab{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}".into(),
            "{{ 'a'|indent(10000000000) }}".into(),
            "{{ 'a\n\n\nb'|indent(width=10000000000, blank=true) }}".into(),
            "{{ ['a']|map('indent', 10000000000, true)|list }}".into(),
            "{{ 'x' * 10**10 }}".into(),
            "{{ 'x' * 100000000 }}".into(),
            format!("{{{{ messages{} }}}}", " ~ 'x' * 100000000".repeat(500)),
            format!("{{{{ messages{} }}}}", " ~ ('x' * 4096) * 4096".repeat(500)),
            "{{ '%10000000000d'|format(1) }}".into(),
            "{{ '%*d'|format(10000000000, 1) }}".into(),
            "{{ '{:>10000000000}'.format(1) }}".into(),
            "{{ '{:{}}'.format(1, 10000000000) }}".into(),
            "{{ 'a'|center(10000000000) }}".into(),
            "{{ 'a'.center(10000000000) }}".into(),
            "{{ 'a'.zfill(10000000000) }}".into(),
            "{{ range(90000)|join('x' * 90000) }}".into(),
            "{{ messages|tojson(indent=10000000000) }}".into(),
            "{{ messages|tojson(indent='x' * 4000 * 4000) }}".into(),
            format!("{{% set x = [1] %}}{}{{{{ x|tojson(indent='{}') }}}}", "{% set x = [x] %}".repeat(150), "x".repeat(200_000)),
            "{% for a in range(90000) %}{% for b in range(9000) %}a long text of the template itself{% endfor %}{% endfor %}".into(),
            "{% set y %}{% for a in range(90000) %}{% for b in range(9000) %}a long text of the template itself{% endfor %}{% endfor %}{% endset %}".into(),
            "{% set x = 'x' * 4000 * (messages|length) * 2000 %}{% for a in range(90000) %}{{ x }}{% endfor %}".into(),
            "{% set x = 'x' * 4000 * (messages|length) * 2000 %}{% for a in range(90000) %}{% for a in range(90000) %}{% if x ~ 'a' == x ~ 'b' %}{% endif %}{% endfor %}{% endfor %}".into(),
            "{% set x = 'x' * 4000 * (messages|length) * 2000 %}{% for a in range(90000) %}{% for a in range(90000) %}{% if 'y' in x %}{% endif %}{% endfor %}{% endfor %}".into(),
            "{% set x = 'x' * 4000 * (messages|length) * 2000 %}{% for a in range(90000) %}{% for a in range(90000) %}{% if x.find('y') %}{% endif %}{% endfor %}{% endfor %}".into(),
            // Lists and maps.
            format!("{}{{{{ x|tojson }}}}", doubled("{% set x = [x, x] %}")),
            format!("{}{{{{ x|string }}}}", doubled("{% set x = [x, x] %}")),
            format!("{}{{% if x == y %}}{{% endif %}}", doubled("{% set x = [x, x] %}{% set y = [y, y] %}")),
            doubled("{% set x = {'a': x, 'b': x} %}"),
            doubled("{% set x = (x, x) %}"),
            doubled("{% set x = dict(a=x, b=x) %}"),
            doubled("{% set x = x|list + x|list %}"),
            doubled("{% set x = (x|list) * 2 %}"),
            doubled("{% set x = [x, x]|map('upper')|list %}"),
            "{{ ([1] * 100000000)|length }}".into(),
            "{{ [1] * 100000000 }}".into(),
            "{{ range(90000)|batch(10000000000, 'x')|list }}".into(),
            "{{ range(90000)|slice(10000000000, 'x')|list }}".into(),
            "{{ (['ab' * 4] * 90000)|sum(start='') }}".into(),
            // What holds itself.
            "{% set ns = namespace() %}{% set ns.self = ns %}{{ ns }}".into(),
            "{% set ns = namespace() %}{% set ns.self = [ns] %}{{ ns|tojson }}".into(),
            "{% set ns = namespace() %}{% set ns.self = {'a': ns} %}{{ ns|string }}".into(),
            "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = b %}{% set b.x = a %}{{ a == b }}".into(),
            "{% set a = namespace() %}{% set b = namespace(x=a) %}{% set a.x = b %}{{ debug(a) }}".into(),
            "{% set ns = namespace(x=1) %}{% for a in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}".into(),
            "{% set ns = namespace(x=1) %}{% for a in range(90000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}".into(),
            "{% set ns = namespace(x=[1]) %}{% for a in range(90000) %}{% set ns.x = dict(a=ns.x) %}{% endfor %}{{ ns.x == ns.x }}".into(),
            "{% include 'chat template' %}".into(),
            "{% extends 'chat template' %}".into(),
            "{% import 'chat template' as x %}".into(),
        ];
        for source in sources {
            eprintln!("{}", source.chars().take(300).collect::<String>());
            let refusal = rendered(&source).unwrap_err();
            assert!(refusal.len() < 500, "{refusal}");
        }
        // Lazily stacked values are no deeper than what they hold.
        for step in
            ["ns.x[0:]", "ns.x|reverse", "ns.x|list", "ns.x|map('int')", "ns.x + []", "[] + ns.x"]
        {
            let source = format!(
                "{{% set ns = namespace(x=[1, 2]) %}}{{% for a in range(9000) %}}{{% set ns.x = {step} %}}{{% endfor %}}{{{{ ns.x|length }}}}"
            );
            assert_eq!(rendered(&source).as_deref(), Ok("2"), "{step}");
        }
    });
}

/// What the engine makes of a template without any bounds.
fn rendered_without_bounds(source: &str) -> String {
    let mut environment = minijinja::Environment::new();
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    let message = minijinja::Value::from_pairs([
        ("role", "user"),
        ("content", "What is there?\nAnd what is not?"),
    ]);
    let context = minijinja::Value::from_pairs([("messages", vec![message])]);
    environment.render_str(source, context).unwrap_or_else(|error| panic!("{source}: {error}"))
}

#[test]
fn templates_within_the_bounds_render_as_ever() {
    for source in [
        "{% set x = 'a' %}{{ x ~ 1 ~ none ~ [1, 'b'] }}",
        "{{ 1 < 2 < 3 }} {{ 1 == 1 != 2 }} {{ 'a' in 'ab' not in ['x'] }} {{ 3 > 2 >= 2 > 1 }}",
        "{{ messages[0:][0].role }} {{ messages[::-1][-1].role }} {{ 'abc'[1:] }} {{ [1, 2, 3][::2] }}",
        "{{ range(3) }} {{ range(3) is sequence }} {{ range(5)[1:3] }} {{ range(5)[2] }} {{ range(5)|last }}",
        "{% set a, b = [1, 2] %}{{ a }}{{ b }} {{ (1, 2) }} {{ {'a': 1} }} {{ (1, 2) is sequence }}",
        "{% for a in [1, 2, 3] if a > 1 %}{{ loop.index }}{{ a }}{{ loop.last }}{% else %}none{% endfor %}",
        "{% for a in [] %}{% else %}none{% endfor %}{{ 'x' if false }}{{ 'y' if false else 'z' }}",
        "{% for a in [[1, [2]]] recursive %}{{ loop(a) if a is sequence else a }};{% endfor %}",
        "{% for a in range(3) %}{{ loop.cycle('x', 'y') }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(3) %}c{% endcall %}",
        "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(20) }}",
        "{% set ns = namespace(a=1) %}{% for x in [1, 2] %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }} {{ ns }}",
        "{% set x %}a{{ 1 }}{% endset %}{{ x|upper }}{% filter upper %}b{% endfilter %}",
        "{% block a %}{{ 1 }}{% endblock %}{% with x = 2 %}{{ x }}{% endwith %}",
        "{% for a in range(9) %}{% if a == 1 %}{% continue %}{% elif a > 2 %}{% break %}{% endif %}{{ a }}{% endfor %}",
        "{{ ['a', 'b']|join('-') }} {{ [3, 1]|sort|first }} {{ [1, 2]|sum }} {{ 'abc'|list }} {{ [1, [2]]|string }}",
        "{{ messages|selectattr('role', 'eq', 'user')|list|length }} {{ ['a']|map('upper')|list }} {{ messages|map(attribute='role')|join(',') }}",
        "{{ '=' * 80 == '=' * 40 ~ '=' * 40 }} {{ x is defined }} {{ x }} {{ x|default('d') }} {{ 1 is eq 1 }}",
        "{{ dict(a=1).items()|list }} {{ {'a': 1}.get('b', 'c') }} {{ 'a,b'.split(',') }} {{ {'b': 1, 'a': 2}|dictsort }}",
        "{{ 'a\nb'|indent(2) }} {{ 'ab'|replace('a', 'c') }} {{ '%s-%d'|format('a', 3) }} {{ '{}-{}'.format(1, 'b') }}",
        "{{ [1, 2, 3]|batch(2)|list }} {{ range(7)|slice(3)|list }} {{ [1, 2] + [3] }} {{ [1] * 3 }} {{ not 1 }} {{ -1 }}",
        "{{ 1 and 2 }} {{ 0 or 'a' }} {{ 'a' if 1 > 2 else 'b' if 2 > 1 else 'c' }} {{ [1, 2]|min }} {{ 7 // 2 }} {{ 2 ** 3 }}",
        "{{ messages[0].content.split('\n')[-1].strip() }} {{ messages[0]['role']|title }} {{ messages|length }}",
    ] {
        assert_eq!(rendered(source), Ok(rendered_without_bounds(source)), "{source}");
    }
}
