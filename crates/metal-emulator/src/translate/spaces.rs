//! What only Metal has, as C++: address spaces, variables in threadgroup memory, function constants,
//! literals and swizzles; and what Metal refuses although C++ doesn't.

use super::text::{Text, Wrong, argument_of};
use super::tokens::Kind;
use std::collections::HashSet;

const SPACES: &[&str] = &["device", "constant", "threadgroup", "thread"];

/// What C++ has and Metal doesn't.
const REFUSED: &[&str] = &[
    "catch",
    "double",
    "dynamic_cast",
    "goto",
    "new",
    "thread_local",
    "throw",
    "try",
    "typeid",
    "virtual",
];

/// Words that a parameter list or a declaration doesn't begin with.
const STATEMENTS: &[&str] = &[
    "case", "else", "for", "goto", "if", "return", "sizeof", "switch", "template", "typedef",
    "using", "while",
];

/// Refuses what Metal refuses: some words, and pointers and references without an address space.
pub fn refuse(text: &Text) -> Result<(), Wrong> {
    let places: Vec<usize> = text.counting(0, text.len()).collect();
    for (i, &at) in places.iter().enumerate() {
        if text.is_word(at) && text.is_any(at, REFUSED) {
            return Err(text.wrong(at, format!("Metal has no `{}`", text.text(at))));
        }
        if text.is(at, "(") {
            check_parameters(text, &places, i)?;
        }
        if text.is_any(at, &[";", "{", "}"]) {
            check_declaration(text, &places[i + 1..])?;
        }
    }
    Ok(())
}

/// The parameters of a function that is defined here: `name(...) {`.
fn check_parameters(text: &Text, places: &[usize], i: usize) -> Result<(), Wrong> {
    let back = |steps: usize| i.checked_sub(steps).map_or("", |i| text.text(places[i]));
    let named = i > 0 && text.is_word(places[i - 1]) && !STATEMENTS.contains(&back(1));
    // What follows `:`, `,` or `.` is a constructor's initialiser or a call, except behind `::`.
    let initialiser = [",", "."].contains(&back(2)) || (back(2) == ":" && back(3) != ":");
    if !named || initialiser {
        return Ok(());
    }
    let close = text.closing(places[i])?;
    let mut behind = text.after(close);
    while let Some(at) = behind.filter(|&at| text.is(at, "const") || text.is_any(at, SPACES)) {
        behind = text.after(at);
    }
    if behind.is_none_or(|at| !text.is(at, "{")) {
        return Ok(());
    }
    for (start, end) in text.pieces(places[i] + 1, close) {
        let words: Vec<usize> = text.counting(start, end).collect();
        let spaced = words.iter().any(|&at| text.is_any(at, SPACES) || text.is(at, "="));
        if !spaced && words.len() > 2 && text.outside(start, end, &["*", "&"]) {
            let parameter = text.normal(start, end);
            let message = format!("the parameter `{parameter}` has no address space");
            return Err(text.wrong(words[0], message));
        }
    }
    Ok(())
}

/// A statement `T* p = ...;` or `T& r = ...;`.
fn check_declaration(text: &Text, places: &[usize]) -> Result<(), Wrong> {
    let mut rest = places;
    while let [at, behind @ ..] = rest {
        if !text.is_any(*at, &["const", "constexpr", "static"]) {
            break;
        }
        rest = behind;
    }
    let Some((&first, mut rest)) = rest.split_first() else { return Ok(()) };
    let is_type = text.is_word(first)
        && !text.is_any(first, STATEMENTS)
        && !text.is_any(first, SPACES)
        && !text.is(first, "auto");
    if !is_type {
        return Ok(());
    }
    if rest.first().is_some_and(|&at| text.is(at, "<")) {
        let (mut depth, mut behind) = (0, 0);
        for (i, &at) in rest.iter().enumerate() {
            match text.text(at) {
                "<" => depth += 1,
                ">" => depth -= 1,
                ";" | "{" | "}" => return Ok(()), // a comparison
                _ => {}
            }
            if depth == 0 {
                behind = i + 1;
                break;
            }
        }
        rest = &rest[behind..];
    }
    let [star, name, then, next, ..] = rest else { return Ok(()) };
    let declares = text.is_any(*star, &["*", "&"])
        && text.is_word(*name)
        && (text.is(*then, ";") || (text.is(*then, "=") && !text.is(*next, "=")));
    if declares {
        let message = format!("the declaration of `{}` has no address space", text.text(*name));
        return Err(text.wrong(*name, message));
    }
    Ok(())
}

/// Writes as C++ what only Metal has.
pub fn translate(text: &mut Text) -> Result<(), Wrong> {
    let mut variables = 0;
    for at in 0..text.len() {
        if !text.counts(at) {
            continue;
        }
        if text.tokens[at].kind == Kind::Number {
            let written = literal(text.text(at));
            text.set(at, written);
        }
        if text.tokens[at].kind != Kind::Word {
            continue;
        }
        match text.text(at) {
            "device" | "thread" => text.set(at, ""),
            "constant" => constant(text, at)?,
            "static_cast" => text.set(at, "msl::cast"),
            "threadgroup" => threadgroup(text, at, &mut variables)?,
            word if is_swizzle(word) && text.before_is(at, ".") && !text.after_is(at, "(") => {
                swizzle(text, at);
            }
            _ => {}
        }
    }
    drop_twins(text, 0, text.len())
}

/// `1.0` is a float in Metal, `1.0h` a half and `1.0bf` a bfloat.
fn literal(text: &str) -> String {
    let hexadecimal = text.starts_with("0x") || text.starts_with("0X");
    let has_point = text.contains(['.', 'e', 'E']);
    if hexadecimal {
        return text.into();
    }
    let whole =
        |digits: &str| if has_point { format!("{digits}f") } else { format!("{digits}.0f") };
    if let Some(digits) = text.strip_suffix("bf").or(text.strip_suffix("BF")) {
        return format!("bfloat({})", whole(digits));
    }
    if let Some(digits) = text.strip_suffix(['h', 'H']) {
        return format!("half({})", whole(digits));
    }
    if has_point && !text.ends_with(['f', 'F', 'l', 'L']) {
        return format!("{text}f");
    }
    text.into()
}

fn is_swizzle(word: &str) -> bool {
    (2..=4).contains(&word.len()) && word.bytes().all(|c| b"xyzw".contains(&c))
}

fn swizzle(text: &mut Text, at: usize) {
    let components: Vec<String> =
        text.text(at).chars().filter_map(|c| "xyzw".find(c)).map(|i| i.to_string()).collect();
    let components = components.join(",");
    let next = text.after(at);
    let then = next.and_then(|next| text.after(next));
    let is = |at: Option<usize>, what: &[&str]| at.is_some_and(|at| text.is_any(at, what));
    let assigned = if is(next, &["+", "-", "*", "/"]) {
        is(then, &["="])
    } else {
        is(next, &["="]) && !is(then, &["="])
    };
    let name = if assigned { "swizzled" } else { "swizzle" };
    text.set(at, format!("template {name}<{components}>()"));
}

/// A function constant, an object or a pointer in constant memory.
fn constant(text: &mut Text, at: usize) -> Result<(), Wrong> {
    let end = text.find(at, &[";", ")", "{", "="]);
    let attributes = end.map_or(String::new(), |end| text.attributes_in(at, end));
    let index = argument_of(&attributes, "function_constant");
    if let (Some(index), Some(end)) = (index, end.filter(|&end| text.is(end, ";"))) {
        let name_at = text.before(end).filter(|&name| name > at && text.is_word(name));
        let name_at =
            name_at.ok_or_else(|| text.wrong(at, "a function constant without a name"))?;
        let name = text.text(name_at).to_string();
        let kind = text.inline(at + 1, name_at);
        // A constant that the text asks about need not be set.
        let words: Vec<usize> = text.counting(0, text.len()).collect();
        let asked = words.windows(3).any(|part| {
            text.is(part[0], "is_function_constant_defined") && text.is(part[2], &name)
        });
        text.set(at, "static const");
        text.set(
            end,
            format!(
                " = msl::function_constant<{kind}>({index}, \"{name}\", {}); \
                 static const bool msl_given_{name} = msl::function_constant_given({index});",
                !asked
            ),
        );
    } else if text.before_is(at, ")") || text.before_is(at, "const") || text.after_is(at, "const") {
        text.set(at, "");
    } else {
        text.set(at, "const");
    }
    Ok(())
}

/// A pointer's or a method's address space, or variables in threadgroup memory: those become members
/// of a structure each, of which the runtime has one for all threads.
fn threadgroup(text: &mut Text, at: usize, variables: &mut usize) -> Result<(), Wrong> {
    let before = text.before(at).map_or("", |before| text.text(before));
    let begins = matches!(before, "" | ";" | "{" | "}" | ":");
    let end = text.find(at, &[";"]).filter(|_| begins);
    if let Some(end) = end.filter(|&end| !text.outside(at, end, &["*", "&"])) {
        let mut declared = String::new();
        let mut base = None;
        for (start, stop) in text.pieces(at + 1, end) {
            let dimensions = text.find(start, &["[", ";", ","]).unwrap_or(stop).min(stop);
            let name_at = text
                .counting(start, dimensions)
                .next_back()
                .filter(|&name| text.is_word(name))
                .ok_or_else(|| text.wrong(at, "a threadgroup variable without a name"))?;
            let base = base.get_or_insert_with(|| text.inline(at + 1, name_at));
            let (name, rest) = (text.text(name_at), text.inline(name_at, stop));
            *variables += 1;
            if !declared.is_empty() {
                declared += "; ";
            }
            let holder = format!("msl_variable_{variables}");
            declared += &format!(
                "struct {holder} {{ {base} {rest}; }}; \
                 auto& {name} = msl::threadgroup_variable<{holder}>(\"{name}\").{name}"
            );
        }
        text.blank(at + 1, end);
        text.set(at, declared);
        return Ok(());
    }
    let mut next = text.after(at);
    while let Some(here) = next.filter(|&here| text.is_word(here) || text.is_any(here, &[":", "<"]))
    {
        let last = if text.is(here, "<") { text.closing(here)? } else { here };
        next = text.after(last);
    }
    let is_parameter = matches!(before, "(" | ",");
    let points = next.is_some_and(|next| {
        text.is_any(next, &["*", "&"])
            || (is_parameter && text.is(next, "["))
            || (text.is(next, "(") && (text.after_is(next, "*") || text.after_is(next, "&")))
    });
    let of_method = |at: usize| text.before_is(at, ")");
    let constant = text.before(at).filter(|&before| text.is(before, "const"));
    let qualifies = of_method(at) || constant.is_some_and(of_method);
    if !points && !qualifies {
        let message = "a variable in threadgroup memory is declared at the start of a statement";
        return Err(text.wrong(at, message));
    }
    text.set(at, "");
    Ok(())
}

/// Functions that differed in nothing but address spaces are the same now: one of them stays.
fn drop_twins(text: &mut Text, from: usize, to: usize) -> Result<(), Wrong> {
    let mut seen = HashSet::new();
    let mut bodies = HashSet::new();
    let (mut at, mut start) = (from, from);
    while at < to {
        match text.text(at) {
            ";" => {
                let declared = text.normal(start, at);
                if declared.contains(") = default") && !seen.insert(declared) {
                    text.blank(start, at + 1);
                }
                start = at + 1;
            }
            "(" => at = text.closing(at)?,
            "{" => {
                let header = text.normal(start, at);
                let end = text.closing(at)?;
                let holds = header.split(' ').any(|word| {
                    matches!(word, "namespace" | "struct" | "class" | "union" | "extern")
                });
                if holds && !header.contains(')') {
                    let is_type = !header.contains("namespace") && !header.contains("extern");
                    let new_body = bodies.insert(format!("{header} {}", text.normal(at, end)));
                    if is_type && !seen.insert(header) && !new_body {
                        text.blank(start, end + 1);
                    } else {
                        drop_twins(text, at + 1, end)?;
                    }
                } else if header.contains(')') {
                    let new_body = bodies.insert(format!("{header} {}", text.normal(at, end)));
                    if !seen.insert(header) {
                        if new_body {
                            let message = "this function differs from an earlier one in its address \
                                spaces and its body, of which the emulator keeps the first only";
                            return Err(text.wrong(at, message));
                        }
                        text.blank(start, end + 1);
                    }
                }
                start = end + 1;
                at = end;
            }
            _ => {}
        }
        at += 1;
    }
    Ok(())
}
