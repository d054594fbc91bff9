//! What a grammar may cost before it is followed. `llguidance` gives up a lexer that takes too much work, but it counts the
//! work only between two derivatives of an expression, and not at all for the first byte of a text. A single derivative of an
//! intersection is a product of those of its parts, so that a schema of a kilobyte would take minutes and gigabytes.

use llguidance::api::ParserLimits;
use llguidance::derivre::raw::ExprSet;
use llguidance::derivre::{ExprRef, RegexAst, RegexBuilder};
use llguidance::earley::lexerspec::LexerSpec;
use llguidance::regex_to_lark;
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// Combinations of the parts of an intersection.
const MOST_COMBINATIONS: u64 = 4 << 20;
/// Alternatives at the beginnings of all parts of the expressions together.
const MOST_ALTERNATIVES: u64 = 16 << 20;
/// Work on the first byte of a text, in the units of `llguidance`, of which 15 000 take a millisecond.
const MOST_WORK: u64 = 4_000_000;
/// Different patterns for the names of properties. Each two of them are compared.
const MOST_NAME_PATTERNS: usize = 32;
/// What a schema follows in Lark's form, and how often it may be there.
const MARKER: &str = "%json";
const MOST_MARKERS: usize = 1024;
/// Parts of an expression that are looked at.
const LOOKED_AT: usize = 4096;
/// What counts for an expression that is larger, and for a string's format.
const MANY: u64 = 256;
const OF_FORMAT: u64 = 2;
/// Keywords whose values have schemas by names, which may be keywords, too.
const OF_NAMES: [&str; 5] =
    ["properties", "patternProperties", "dependentSchemas", "$defs", "definitions"];
/// Keywords whose values are data, not schemas.
const DATA: [&str; 4] = ["default", "examples", "enum", "const"];
/// Keywords of which one schema holds.
const ALTERNATIVES: [&str; 2] = ["anyOf", "oneOf"];

/// For each byte, in how many ways an expression may go on with it.
type Ways = [u64; 256];
const ONE: Ways = [1; 256];

fn together(mut ways: Ways, others: &Ways) -> Ways {
    for (way, other) in ways.iter_mut().zip(others) {
        *way = way.saturating_mul(*other);
    }
    ways
}

fn most(mut ways: Ways, others: &Ways) -> Ways {
    for (way, other) in ways.iter_mut().zip(others) {
        *way = (*way).max(*other);
    }
    ways
}

fn check_ways(ways: &Ways) -> Result<(), String> {
    match ways.iter().copied().fold(0, u64::saturating_add) <= MOST_COMBINATIONS {
        true => Ok(()),
        false => Err("too many patterns have to hold for the same text; make one of them".into()),
    }
}

/// Refuses expressions whose derivatives are too large.
pub(super) fn check_expressions(expressions: &ExprSet) -> Result<(), String> {
    let mut alternatives: Vec<u64> = vec![0; expressions.len()];
    let mut sum = 0_u64;
    // An expression comes after its parts.
    for index in 1..alternatives.len() {
        let expression = ExprRef::new(u32::try_from(index).map_err(|error| error.to_string())?);
        if !expressions.is_valid(expression) {
            continue;
        }
        let parts = expressions.get_args(expression);
        let of = |part: &ExprRef| alternatives.get(part.as_usize()).copied().unwrap_or(0);
        // The kinds have names outside of their crate only so.
        let found = match format!("{:?}", expressions.get_tag(expression)).as_str() {
            "And" => check_intersection(expressions, parts).map(|()| 1)?,
            "Or" => parts.iter().map(of).fold(0, u64::saturating_add),
            "Concat" => match parts {
                [first, rest] if expressions.is_nullable(*first) => of(first) + of(rest),
                _ => parts.first().map_or(1, of),
            },
            "Not" | "Repeat" | "Lookahead" => parts.first().map_or(1, of),
            _ => 1,
        };
        sum = sum.saturating_add(found);
        if let Some(place) = alternatives.get_mut(index) {
            *place = found;
        }
        if sum > MOST_ALTERNATIVES {
            return Err("its regular expressions have too many optional parts in a row".into());
        }
    }
    Ok(())
}

fn check_intersection(expressions: &ExprSet, parts: &[ExprRef]) -> Result<(), String> {
    // The alternatives of a complement exclude each other, so there is one for each byte.
    let is_complement = |part: &&ExprRef| format!("{:?}", expressions.get_tag(**part)) == "Not";
    let parts = parts.iter().filter(|part| !is_complement(part));
    check_ways(&parts.fold(ONE, |all, part| together(all, &ways(expressions, *part))))
}

/// In how many ways an expression may go on, wherever one is in it: by each set of bytes that is a part of it, and by the
/// next byte of a text.
fn ways(expressions: &ExprSet, top: ExprRef) -> Ways {
    let (mut seen, mut waiting, mut ways) = (HashSet::new(), vec![top], ONE);
    while let Some(next) = waiting.pop() {
        if !seen.insert(next) {
            continue;
        }
        if seen.len() > LOOKED_AT {
            return [MANY; 256];
        }
        let part = expressions.get(next);
        waiting.extend_from_slice(part.args());
        if part.args().is_empty() {
            for (byte, way) in (0..=u8::MAX).zip(&mut ways) {
                *way += u64::from(!part.surely_no_match(byte));
            }
        }
    }
    ways
}

/// Refuses a lexer whose first byte takes more work than the limits have for the whole of it.
pub(super) fn check_start(lexer: &LexerSpec, limits: &ParserLimits) -> Result<(), String> {
    let mut limits = limits.clone();
    let mut automaton = lexer.to_regex_vec(&mut limits).map_err(|error| error.to_string())?;
    automaton.set_fuel(MOST_WORK);
    let start = automaton.initial_state(&lexer.all_lexemes());
    for byte in 0..=u8::MAX {
        automaton.transition(start, byte);
        if automaton.has_error() {
            return Err("its regular expressions or numbers take too much work".into());
        }
    }
    Ok(())
}

/// Refuses a schema with more patterns for one string than can be followed together, which `llguidance` would find out by
/// trying.
pub(super) fn check_schema(schema: &Value) -> Result<(), String> {
    let mut names = HashSet::new();
    find_name_patterns(schema, &mut names);
    if names.len() > MOST_NAME_PATTERNS {
        let (found, most) = (names.len(), MOST_NAME_PATTERNS);
        return Err(format!(
            "patternProperties: {found} different patterns, expected at most {most}"
        ));
    }
    let mut patterns = Patterns {
        root: schema,
        has_names: has_names(schema),
        patterns: HashMap::new(),
        references: HashMap::new(),
        all: None,
    };
    check_ways(&patterns.together(schema))
}

fn find_name_patterns<'a>(schema: &'a Value, found: &mut HashSet<&'a str>) {
    if let Some(Value::Object(patterns)) = schema.get("patternProperties") {
        found.extend(patterns.keys().map(String::as_str));
    }
    for part in parts(schema) {
        find_name_patterns(part, found);
    }
}

/// What a value of JSON is made of.
fn parts(value: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match value {
        Value::Object(fields) => Box::new(fields.values()),
        Value::Array(items) => Box::new(items.iter()),
        _ => Box::new(std::iter::empty()),
    }
}

/// Refuses a grammar in Lark's form that has a schema which [`check_schema`] refuses.
pub(super) fn check_lark(source: &str) -> Result<(), String> {
    let found = source.matches(MARKER).count();
    if found > MOST_MARKERS {
        return Err(format!("has {MARKER} {found} times, expected at most {MOST_MARKERS}"));
    }
    schemas_in(source).try_for_each(|schema| check_schema(&schema))
}

/// The schemas within a grammar in Lark's form, and what only looks like one: a marker may also stand in a schema's string, so
/// a schema isn't cut there, or in a string of the grammar, so what can be read behind it isn't passed over.
fn schemas_in(source: &str) -> impl Iterator<Item = Value> + '_ {
    source.match_indices(MARKER).filter_map(|(at, _)| {
        let rest = source.get(at + MARKER.len()..)?;
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        values.next()?.ok()
    })
}

/// Whether references within a schema may lead to names of its parts, or start from them.
fn has_names(schema: &Value) -> bool {
    const NAMES: [&str; 5] = ["$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"];
    let is_named =
        |part: &Value| NAMES.iter().any(|name| part.get(name).is_some_and(Value::is_string));
    let is_or_has = |part: &Value| is_named(part) || has_names(part);
    match schema {
        Value::Object(fields) => fields.iter().any(|(key, value)| match key.as_str() {
            key if OF_NAMES.contains(&key) => parts(value).any(is_or_has),
            key => !DATA.contains(&key) && is_or_has(value),
        }),
        _ => parts(schema).any(is_or_has),
    }
}

/// The patterns of a schema that may hold for the same string.
struct Patterns<'a> {
    root: &'a Value,
    /// Whether references can't be followed as paths from the root.
    has_names: bool,
    /// In how many ways each pattern may go on.
    patterns: HashMap<&'a str, Ways>,
    /// What is behind each reference; nothing while it is looked at, as no schema holds for a value twice.
    references: HashMap<&'a str, Ways>,
    /// All patterns together, once that is known.
    all: Option<Ways>,
}

impl<'a> Patterns<'a> {
    /// In how many ways the string may go on that has the most of them, wherever in the schema it is.
    fn together(&mut self, schema: &'a Value) -> Ways {
        let fields = match schema {
            Value::Object(fields) => fields,
            Value::Array(items) => return self.most(items),
            _ => return ONE,
        };
        let (mut here, mut within) = (ONE, self.own(fields));
        for (key, value) in fields {
            let more = match (key.as_str(), value) {
                ("allOf", Value::Array(all)) => {
                    all.iter().fold(ONE, |ways, schema| together(ways, &self.together(schema)))
                }
                (key, Value::Array(any)) if ALTERNATIVES.contains(&key) => self.most(any),
                ("$ref", Value::String(reference)) => self.behind(reference),
                ("$defs" | "definitions", _) => continue,
                (key, Value::Object(named)) if OF_NAMES.contains(&key) => {
                    for schema in named.values() {
                        within = most(within, &self.together(schema));
                    }
                    continue;
                }
                (key, _) if DATA.contains(&key) => continue,
                (_, other) => {
                    within = most(within, &self.together(other));
                    continue;
                }
            };
            here = together(here, &more);
        }
        together(here, &within)
    }

    fn most(&mut self, schemas: &'a [Value]) -> Ways {
        schemas.iter().fold(ONE, |ways, schema| most(ways, &self.together(schema)))
    }

    /// Those of a schema's own keywords.
    fn own(&mut self, fields: &'a Map<String, Value>) -> Ways {
        let pattern = fields.get("pattern").and_then(Value::as_str);
        let own = pattern.map_or(ONE, |pattern| self.pattern(pattern));
        match fields.get("format").is_some_and(Value::is_string) {
            true => together(own, &[OF_FORMAT; 256]),
            false => own,
        }
    }

    fn pattern(&mut self, pattern: &'a str) -> Ways {
        *self.patterns.entry(pattern).or_insert_with(|| {
            let mut builder = RegexBuilder::new();
            let expression = builder.mk(&RegexAst::SearchRegex(regex_to_lark(pattern, "dw")));
            // What is wrong with it is said by whoever compiles it.
            expression.map_or(ONE, |expression| ways(builder.exprset(), expression))
        })
    }

    fn behind(&mut self, reference: &'a str) -> Ways {
        if let Some(known) = self.references.get(reference) {
            return *known;
        }
        let path = reference.strip_prefix('#').filter(|_| !self.has_names);
        let Some(schema) = path.and_then(|path| self.root.pointer(path)) else {
            return self.all();
        };
        self.references.insert(reference, ONE);
        let found = self.together(schema);
        self.references.insert(reference, found);
        found
    }

    /// All patterns that there are.
    fn all(&mut self) -> Ways {
        if let Some(all) = self.all {
            return all;
        }
        let (mut all, mut waiting) = (ONE, vec![self.root]);
        while let Some(next) = waiting.pop() {
            if let Value::Object(fields) = next {
                all = together(all, &self.own(fields));
            }
            waiting.extend(parts(next));
        }
        self.all = Some(all);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn patterns(count: usize) -> Vec<Value> {
        (0..count).map(|n| json!({"type": "string", "pattern": format!(".*{n}.*")})).collect()
    }

    #[test]
    fn patterns_of_one_string_are_counted_wherever_they_stand() {
        assert!(check_schema(&json!({"allOf": patterns(4)})).is_ok());
        assert!(check_schema(&json!({"allOf": patterns(30)})).is_err());
        let named = json!({"properties": {"default": {"allOf": patterns(30)}}});
        assert!(check_schema(&named).is_err());
        // Each for a string of its own.
        assert!(check_schema(&json!({"prefixItems": patterns(1000)})).is_ok());
        assert!(check_schema(&json!({"anyOf": patterns(1000)})).is_ok());
        let of_property: Vec<Value> =
            patterns(30).into_iter().map(|it| json!({"properties": {"a": it}})).collect();
        assert!(check_schema(&json!({"allOf": of_property})).is_err());
        let chain = (0..30).map(|n| {
            let next = format!("#/$defs/a{}", n + 1);
            (format!("a{n}"), json!({"pattern": format!(".*{n}.*"), "$ref": next}))
        });
        let chain: Map<String, Value> = chain.collect();
        assert!(check_schema(&json!({"$defs": chain, "$ref": "#/$defs/a0"})).is_err());
        // A tree's node refers to itself, for other values.
        let node = json!({"allOf": patterns(2), "items": {"$ref": "#/$defs/node"}});
        assert!(check_schema(&json!({"$defs": {"node": node}, "$ref": "#/$defs/node"})).is_ok());
    }

    #[test]
    fn ordinary_schemas_are_not_refused() {
        let mixins: Vec<Value> = (0..10)
            .map(|n| {
                let of_mixin = (format!("at{n}"), json!({"type": "string", "format": "date-time"}));
                json!({"properties": Map::from_iter([of_mixin])})
            })
            .collect();
        let base =
            json!({"properties": {"id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$"}}});
        assert!(
            check_schema(&json!({
                "$defs": {"base": base}, "default": {"id": "x"}, "examples": [{"$anchor": "y"}],
                "allOf": mixins, "$ref": "#/$defs/base",
            }))
            .is_ok()
        );
    }

    #[test]
    fn patterns_for_names_are_few() {
        let names = |count: usize| {
            let patterns = (0..count).map(|n| (format!("^a{n}"), json!({"type": "integer"})));
            json!({"items": {"patternProperties": patterns.collect::<Map<_, _>>()}})
        };
        assert!(check_schema(&names(MOST_NAME_PATTERNS)).is_ok());
        assert!(check_schema(&names(MOST_NAME_PATTERNS + 1)).is_err());
    }

    #[test]
    fn references_by_name_may_lead_to_every_pattern() {
        assert!(has_names(&json!({"properties": {"default": {"$id": "a"}}})));
        assert!(!has_names(&json!({"$id": "a", "default": {"id": "a"}})));
        let named = |count: usize| json!({"$defs": {"a": {"$anchor": "a", "allOf": patterns(count)}}, "$ref": "#a"});
        assert!(check_schema(&named(2)).is_ok());
        assert!(check_schema(&named(30)).is_err());
    }

    #[test]
    fn schemas_in_a_grammar_are_found() {
        let source = "start: \"a\" %json {\"type\": \"string\"} | %json { \"a\": [1] }\nb: /x/";
        let found: Vec<Value> = schemas_in(source).collect();
        assert_eq!(found, [json!({"type": "string"}), json!({"a": [1]})]);
        // Within a schema's string, and within one of the grammar.
        let schema = json!({"description": "%json", "allOf": [{"pattern": "a"}]});
        let found = |source: &str| schemas_in(source).any(|found| found == schema);
        assert!(found(&format!("start: \"a\" %json {schema}")));
        assert!(found(&format!("start: \"%json\" %json {schema}")));
    }

    #[test]
    fn schemas_in_a_grammar_are_few() {
        let grammar = |count: usize| format!("start: {}", "%json {} ".repeat(count));
        assert!(check_lark(&grammar(MOST_MARKERS)).is_ok());
        assert!(check_lark(&grammar(MOST_MARKERS + 1)).is_err());
    }
}
