//! Checks what the host and CUDA kernels have to agree on. Structs that are passed to kernels are declared as
//! `#[repr(C)]` in Rust and under the same name in the kernels' sources, with the same fields, of the same types and
//! in the same order: both languages lay such structs out by the same rules. Constants that both declare have one
//! value. The texts are compared, so no GPU and no nvcc is needed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A struct's text: what aligns it, and its fields' declarations.
struct Declaration {
    alignment: Option<usize>,
    fields: Vec<String>,
}

/// The structs and integer constants of some sources of one language.
struct Sources {
    language: Language,
    structs: BTreeMap<String, Declaration>,
    /// The values of every constant that is given as a number.
    constants: BTreeMap<String, Vec<usize>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Language {
    Rust,
    Cuda,
}

/// What a field is in memory.
#[derive(Clone, Debug, PartialEq)]
enum Kind {
    /// A pointer, or an unsigned number of 64 bits.
    Address,
    I64,
    I32,
    F32,
    F64,
    /// The beginning of a struct that is aligned to so many bytes.
    Aligned(usize),
}

/// A field by its path, such as `at[1].scale`.
type Field = (String, Kind);

impl Sources {
    /// Of structs of one name, the last file's counts.
    fn read(language: Language, files: &[PathBuf]) -> Sources {
        let mut sources =
            Sources { language, structs: BTreeMap::new(), constants: BTreeMap::new() };
        for file in files {
            let text = fs::read_to_string(file).unwrap();
            let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
            let text = lines.collect::<Vec<_>>().join("\n");
            sources.find_structs(&text, file);
            sources.find_constants(&text);
        }
        sources
    }

    fn find_structs(&mut self, text: &str, file: &Path) {
        let (attribute, alignment) = match self.language {
            Language::Rust => ("#[repr(C", "align("),
            Language::Cuda => ("struct ", "alignas("),
        };
        for (start, _) in text.match_indices(attribute) {
            let rest = &text[start..];
            let (head, open) = rest.split_at(rest.find(['{', ';']).unwrap_or(rest.len()));
            if !open.starts_with('{') {
                // Kernels announce structs that are declared later.
                let is_rust = self.language == Language::Rust;
                assert!(!is_rust, "{}: {head}: expected fields with names", file.display());
                continue;
            }
            let alignment = head
                .split_once(alignment)
                .and_then(|(_, after)| after.split(')').next()?.parse().ok());
            // The last word: `struct alignas(16) Name`, `pub(crate) struct Name`.
            let name = head.split_whitespace().last().unwrap().to_string();
            let fields = fields(body(open), self.language);
            self.structs.insert(name, Declaration { alignment, fields });
        }
    }

    /// Those outside of functions.
    fn find_constants(&mut self, text: &str) {
        let first = match self.language {
            Language::Rust => "const ",
            Language::Cuda => "constexpr int ",
        };
        let lines = text.split("\n").filter(|line| !line.starts_with(' '));
        let declarations = lines.filter_map(|line| line.split_once(first)?.1.split(';').next());
        // Several in one declaration have commas between them.
        for each in declarations.flat_map(|declaration| declaration.split(", ")) {
            let Some((name, value)) = each.split_once(" = ") else { continue };
            let name = name.split(':').next().unwrap_or_default().trim();
            if let Ok(value) = value.trim().parse() {
                self.constants.entry(name.to_string()).or_default().push(value);
            }
        }
    }

    /// The fields of a struct with those of the structs and arrays in it, in order.
    fn flat(&self, name: &str) -> Vec<Field> {
        let declaration =
            self.structs.get(name).unwrap_or_else(|| panic!("no struct {name} was found"));
        let mut out = Vec::new();
        if let Some(bytes) = declaration.alignment {
            out.push((String::new(), Kind::Aligned(bytes)));
        }
        for field in &declaration.fields {
            match self.language {
                Language::Rust => {
                    let (name, kind) = field.split_once(':').unwrap();
                    let name = name.split_whitespace().last().unwrap();
                    self.add_rust(name.to_string(), kind.trim(), &mut out);
                }
                Language::Cuda => self.add_cuda(field, &mut out),
            }
        }
        out
    }

    fn add_rust(&self, path: String, kind: &str, out: &mut Vec<Field>) {
        if let Some(array) = kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')) {
            let (of, count) = array.rsplit_once(';').unwrap();
            for index in 0..self.number(count) {
                self.add_rust(format!("{path}[{index}]"), of.trim(), out);
            }
            return;
        }
        let kind = match kind {
            "u64" => Kind::Address,
            "i64" => Kind::I64,
            "i32" => Kind::I32,
            "f32" => Kind::F32,
            "f64" => Kind::F64,
            other => return out.extend(self.inside(&path, other)),
        };
        out.push((path, kind));
    }

    /// Of a declaration such as `const float *a, *b[2]`.
    fn add_cuda(&self, declaration: &str, out: &mut Vec<Field>) {
        let (first, others) = declaration.split_once(',').unwrap_or((declaration, ""));
        let end = first.rfind([' ', '*']).unwrap() + 1;
        let kind = first[..end].replace("const ", "").replace('*', "");
        let first = first[first.find('*').unwrap_or(end)..].trim();
        for declarator in [first].into_iter().chain(others.split(',')).map(str::trim) {
            if declarator.is_empty() {
                continue;
            }
            let (name, count) = match declarator.split_once('[') {
                Some((name, count)) => (name, Some(self.number(count.trim_end_matches(']')))),
                None => (declarator, None),
            };
            let is_pointer = name.starts_with('*');
            let name = name.trim_start_matches('*');
            let paths = match count {
                Some(count) => (0..count).map(|index| format!("{name}[{index}]")).collect(),
                None => vec![name.to_string()],
            };
            for path in paths {
                let kind = match kind.trim() {
                    _ if is_pointer => Kind::Address,
                    "uint64_t" => Kind::Address,
                    "int64_t" => Kind::I64,
                    "int" => Kind::I32,
                    "float" => Kind::F32,
                    "double" => Kind::F64,
                    other => {
                        out.extend(self.inside(&path, other));
                        continue;
                    }
                };
                out.push((path, kind));
            }
        }
    }

    /// The fields of the struct at `path`.
    fn inside(&self, path: &str, name: &str) -> impl Iterator<Item = Field> {
        self.flat(name).into_iter().map(move |(field, kind)| (format!("{path}.{field}"), kind))
    }

    fn number(&self, text: &str) -> usize {
        let text = text.trim();
        let known = self.constants.get(text).and_then(|values| values.last());
        text.parse()
            .unwrap_or_else(|_| *known.unwrap_or_else(|| panic!("no constant {text} was found")))
    }
}

/// What is between the first brace, which the text begins with, and its partner.
fn body(text: &str) -> &str {
    let mut depth = 0;
    for (index, character) in text.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 1 => return &text[1..index],
            '}' => depth -= 1,
            _ => {}
        }
    }
    panic!("a brace isn't closed: {text}")
}

/// The declarations of a struct's fields. What has a body of its own is a function.
fn fields(body: &str, language: Language) -> Vec<String> {
    let end = if language == Language::Rust { ',' } else { ';' };
    let (mut fields, mut field, mut depth) = (Vec::new(), String::new(), 0);
    for character in body.chars() {
        match character {
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                field.clear();
            }
            _ if depth > 0 => {}
            _ if character == end => fields.push(std::mem::take(&mut field)),
            _ => field.push(character),
        }
    }
    fields.push(field);
    let spaced = fields.iter().map(|field| field.split_whitespace().collect::<Vec<_>>().join(" "));
    spaced.filter(|field| !field.is_empty()).collect()
}

/// The sources in a folder, and below it where nothing of the host's is.
fn files(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let ending = path.extension().and_then(|ending| ending.to_str());
        if path.is_dir() && !path.join("mod.rs").exists() {
            found.extend(files(&path, endings));
        } else if ending.is_some_and(|ending| endings.contains(&ending)) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Folders with sources of kernels and of their host.
fn folders(folder: &Path, out: &mut Vec<PathBuf>) {
    if !files(folder, &["cu", "cuh"]).is_empty() {
        out.push(folder.to_path_buf());
    }
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.join("mod.rs").exists() {
            folders(&path, out);
        }
    }
}

/// Every folder with kernels, with its sources of the host and of kernels.
fn all_folders() -> Vec<(PathBuf, Vec<PathBuf>, Vec<PathBuf>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(source()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            folders(&path, &mut all);
        }
    }
    let sources = |folder: PathBuf| {
        let (mut host, kernels) = (files(&folder, &["rs"]), files(&folder, &["cu", "cuh"]));
        let others = ["cpu.rs", "metal.rs", "tests.rs"];
        host.retain(|file| !others.iter().any(|other| file.ends_with(other)));
        (folder, host, kernels)
    };
    all.into_iter().map(sources).collect()
}

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

#[test]
fn constants_of_host_and_kernels_have_one_value() {
    let mut compared = Vec::new();
    for (folder, host, kernels) in all_folders() {
        let kernels = Sources::read(Language::Cuda, &kernels).constants;
        for (name, ours) in Sources::read(Language::Rust, &host).constants {
            let Some(theirs) = kernels.get(&name) else { continue };
            // Several kernels may each have one of this name.
            let shared = ours.iter().any(|value| theirs.contains(value));
            assert!(shared, "{name} in {}: {ours:?} and {theirs:?}", folder.display());
            compared.push(name);
        }
    }
    assert!(compared.len() >= 35, "only {compared:?} were found");
}

#[test]
fn structs_of_launches_are_declared_alike_by_host_and_kernels() {
    let shared = files(&source().join("backend/cuda"), &["cuh"]);
    let shared_host = files(&source().join("backend/cuda"), &["rs"]);
    let mut compared = Vec::new();
    for (folder, own, own_kernels) in all_folders() {
        let own_structs = Sources::read(Language::Rust, &own).structs;
        if own_structs.is_empty() {
            continue;
        }
        let with = |own: Vec<PathBuf>, shared: &[PathBuf]| {
            let others = shared.iter().filter(|path| !own.contains(path)).cloned();
            others.chain(own.iter().cloned()).collect::<Vec<_>>()
        };
        let host = Sources::read(Language::Rust, &with(own, &shared_host));
        let kernels = Sources::read(Language::Cuda, &with(own_kernels, &shared));
        for name in own_structs.into_keys() {
            let (ours, theirs) = (host.flat(&name), kernels.flat(&name));
            assert_eq!(ours, theirs, "{name} in {}", folder.display());
            compared.push(name);
        }
    }
    assert!(compared.len() >= 17, "only {compared:?} were found");
}

#[test]
fn a_difference_of_order_name_or_type_is_found() {
    let flat = |language, text: &str| {
        let mut sources =
            Sources { language, structs: BTreeMap::new(), constants: BTreeMap::new() };
        sources.find_structs(text, Path::new("test"));
        sources.find_constants(text);
        sources.flat("Outer")
    };
    let host = flat(
        Language::Rust,
        "const MOST: usize = 2;
         #[repr(C, align(128))] struct Inner { words: [u64; MOST] }
         #[repr(C)]\n#[derive(Clone)]\npub(crate) struct Outer {
             pub(crate) from: u64, to: u64, inner: Inner, count: i64, sizes: [i32; 2], f: f32,
         }",
    );
    let kernel = |fields: &str| {
        let text = "constexpr int OTHER = 1, MOST = 2;
            struct alignas(128) Inner { uint64_t words[MOST]; };
            struct Later;
            template <int N> struct Elements { int at[N]; };
            struct Outer { FIELDS int sum() const { int x = 0; return x; } };";
        flat(Language::Cuda, &text.replace("FIELDS", fields))
    };
    let right = "const float *from; void *to; Inner inner; int64_t count; int sizes[2]; float f;";
    assert_eq!(kernel(right), host);
    assert_eq!(kernel(&right.replace("; void *to", ", *to")), host);
    for (part, wrong) in [
        ("const float *from; void *to", "void *to; const float *from"),
        ("void *to", "void *into"),
        ("Inner inner", "uint64_t inner[2]"),
        ("int64_t count", "int count"),
        ("int64_t count", "double count"),
        ("sizes[2]", "sizes[1]"),
        ("float f;", "float f, g;"),
        ("float f;", ""),
    ] {
        assert_ne!(kernel(&right.replace(part, wrong)), host, "{wrong}");
    }
}
