//! Templates are programs that came with a model, so what they may do is bounded: the size and nesting of their source,
//! the steps they take, the values they make and what they print. A real template is far from every bound.
//!
//! A template is parsed on a stack that is large enough for every source that passes [`check_source`]. Its compiled
//! instructions get more of them in between ([`guard`]): what makes a value is followed by a check of that value, and
//! what compares values or turns them into text comes after a check of both, as a value that holds itself has no end and
//! one that holds another twice, sixty times over, has none that anybody lives to see. Filters, functions and methods
//! that may make much of little are checked before they are called ([`before`]). So every value is within [`Budget`]'s
//! bounds, and everything that is done with one costs no more than what was counted.

mod constants;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Enumerator, Object, ObjectRepr, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, filters, tests};

use self::constants::check_constants;
use super::python;
use crate::foreign::contained;

/// The longest source, in bytes; the longest of a known model has some 30 thousand.
const MAX_SOURCE: usize = 256 << 10;
/// Tokens between the braces of one tag. Every operator nests one expression in another.
const MAX_TAG_TOKENS: usize = 4096;
/// `elif`s of a template, each of which is nested in the one before.
const MAX_ELIFS: usize = 512;
/// Blocks of what the model writes, and other uses of the word.
const MAX_GENERATIONS: usize = 1000;
/// What the parser's recursion takes at most is a fraction of this, in bytes; the tests try.
const PARSER_STACK: usize = 128 << 20;
/// Instructions that a rendering may take, of which there are some hundred a message.
const FUEL: u64 = 50_000_000;
/// How deep values may be nested; JSON that is read may be 128 deep.
const DEEPEST: usize = 200;

/// The variable that holds how much the caller gave to the template, in bytes. No template can write its name.
pub(super) const INPUT: &str = "\0input";

// Filters that the guarded instructions call. No template can write their names.
const MADE: &str = "\0made";
const OPERANDS: &str = "\0operands";
const TEXTS: &str = "\0texts";
const ATTRIBUTE: &str = "\0attribute";
const PRINTED: &str = "\0printed";
const LOOPED: &str = "\0looped";

/// A template's instructions, ready to be run.
pub(super) struct Program<'a> {
    pub(super) instructions: Instructions<'a>,
    pub(super) blocks: BTreeMap<&'a str, Instructions<'a>>,
}

impl fmt::Debug for Program<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").finish_non_exhaustive()
    }
}

fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Checks what can be known of a source before anything looks for something in it.
pub(super) fn check_length(source: &str) -> Result<(), String> {
    if source.len() > MAX_SOURCE {
        return Err(format!(
            "has {} bytes; templates of at most {MAX_SOURCE} bytes are read",
            source.len()
        ));
    }
    // Each is searched for up to the end of the source.
    if source.matches("generation").count() > MAX_GENERATIONS {
        return Err(format!("has more than {MAX_GENERATIONS} times `generation`"));
    }
    Ok(())
}

/// Parses and compiles a template.
pub(super) fn compile<'a>(
    name: &'a str,
    source: &'a str,
    syntax: &SyntaxConfig,
) -> Result<Program<'a>, Error> {
    check_source(source, syntax)?;
    let compile = || {
        let statements = parse(source, name, syntax.clone())?;
        check_constants(&statements)?;
        let mut generator = CodeGenerator::new(name, source);
        generator.compile_stmt(&statements);
        let (instructions, blocks) = generator.finish();
        let mut guarded = BTreeMap::new();
        for (name, block) in &blocks {
            guarded.insert(*name, guard(block)?);
        }
        Ok::<_, Error>(Program { instructions: guard(&instructions)?, blocks: guarded })
    };
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .stack_size(PARSER_STACK)
            .spawn_scoped(scope, || contained(compile))
            .map_err(|error| {
                refused(format!(
                    "cannot be read now, as the system gives this process no thread with a stack of {} MiB ({error}); allow it \
                     more memory or threads (ulimit -v, ulimit -u)",
                    PARSER_STACK >> 20
                ))
            })?
            .join()
            .unwrap_or_else(|_| Err("no reason given".into()))
            .unwrap_or_else(|panic| Err(refused(format!("the parser gave up on it ({panic})"))))
    })
}

/// Checks what decides how deep the parser recurses. Blocks, lists and brackets it counts itself.
fn check_source(source: &str, syntax: &SyntaxConfig) -> Result<(), Error> {
    let (mut tokens, mut elifs) = (0, 0);
    for token in tokenize(source, false, syntax.clone()) {
        // The parser meets the same mistake, and says where.
        let Ok((token, span)) = token else { break };
        match token {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => tokens = 0,
            _ => tokens += 1,
        }
        elifs += usize::from(matches!(token, Token::Ident("elif")));
        if tokens > MAX_TAG_TOKENS {
            return Err(refused(format!(
                "line {}: a tag has more than {MAX_TAG_TOKENS} names, numbers and signs",
                span.start_line
            )));
        }
        if elifs > MAX_ELIFS {
            return Err(refused(format!("has more than {MAX_ELIFS} times `elif`")));
        }
    }
    Ok(())
}

/// The same instructions with checks in between.
fn guard<'a>(plain: &Instructions<'a>) -> Result<Instructions<'a>, Error> {
    let mut guarded = Instructions::new(plain.name(), plain.source());
    let mut places = Vec::new();
    let mut count = 0;
    for index in 0.. {
        places.push(count);
        let Some(instruction) = plain.get(index) else { break };
        let mut add = |instruction: Instruction<'a>| {
            count = 1 + match (plain.get_span(index), plain.get_line(index)) {
                (Some(span), _) => guarded.add_with_span(instruction, span),
                (None, Some(line)) => {
                    guarded.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX))
                }
                (None, None) => guarded.add(instruction),
            };
        };
        let filter = |name| Instruction::ApplyFilter(name, Some(1), u8::MAX);
        match instruction {
            Instruction::Add
            | Instruction::Mul
            | Instruction::Slice
            | Instruction::EndCapture
            | Instruction::CallFunction(..)
            | Instruction::CallMethod(..)
            | Instruction::CallObject(..)
            | Instruction::BuildList(..)
            | Instruction::BuildTuple(..)
            | Instruction::BuildMap(..) => {
                add(instruction.clone());
                add(filter(MADE));
            }
            Instruction::Eq
            | Instruction::Ne
            | Instruction::Gt
            | Instruction::Gte
            | Instruction::Lt
            | Instruction::Lte
            | Instruction::In
            | Instruction::CompareAndPreserve(..)
            | Instruction::StringConcat
            | Instruction::SetAttr(..) => {
                add(Instruction::BuildTuple(Some(2)));
                add(filter(match instruction {
                    Instruction::SetAttr(..) => ATTRIBUTE,
                    Instruction::StringConcat => TEXTS,
                    _ => OPERANDS,
                }));
                add(Instruction::UnpackList(2));
                // The first of a list ends on top of the stack.
                add(Instruction::Swap);
                add(instruction.clone());
                if matches!(instruction, Instruction::StringConcat) {
                    add(filter(MADE));
                }
            }
            Instruction::EmitRaw(text) => {
                add(Instruction::LoadConst(Value::from(text.len())));
                add(filter(PRINTED));
                add(Instruction::DiscardTop);
                add(instruction.clone());
            }
            Instruction::PushLoop(..) | Instruction::FastRecurse => {
                add(filter(LOOPED));
                add(instruction.clone());
            }
            Instruction::Include(..) | Instruction::LoadBlocks | Instruction::ExportLocals => {
                return Err(refused(
                    "a chat template stands alone; include, import and extends are not supported",
                ));
            }
            other => add(other.clone()),
        }
    }
    for index in 0..count {
        let target = match guarded.get_mut(index) {
            Some(
                Instruction::Jump(target)
                | Instruction::JumpIfFalse(target)
                | Instruction::JumpIfFalseOrPop(target)
                | Instruction::JumpIfTrueOrPop(target)
                | Instruction::Iterate(target)
                | Instruction::BuildMacro(_, target, _),
            ) => target,
            _ => continue,
        };
        let place = usize::try_from(*target).ok().and_then(|target| places.get(target));
        *target = *place.ok_or_else(|| refused("the parser gave up on it"))?;
    }
    Ok(guarded)
}

/// What a rendering may still do.
struct Budget {
    /// The most bytes of text in one value.
    text: usize,
    /// The most values in one value, counting one that is held twice twice.
    nodes: usize,
    /// Bytes that may still be allocated or printed.
    bytes: usize,
    /// Values that may still be looked at, or each 64 bytes of text.
    work: usize,
}

impl Budget {
    /// The budget of a rendering of `input` bytes of conversation.
    fn new(input: usize) -> Self {
        let plus = |base: usize, times: usize| base.saturating_add(input.saturating_mul(times));
        Self {
            text: plus(8 << 20, 4),
            nodes: plus(300_000, 1),
            bytes: plus(512 << 20, 256),
            work: plus(50_000_000, 16),
        }
    }

    fn of<'a>(state: &'a mut State) -> &'a mut Self {
        if state.get_extension::<Self>().is_none() {
            let input = state.lookup(INPUT).and_then(|input| input.as_usize());
            state.get_or_insert_extension(Self::new(input.unwrap_or(0)));
        }
        state.get_or_insert_extension_with(|| Self::new(0))
    }

    fn take_work(&mut self, work: usize) -> Result<(), Error> {
        self.work = self.work.checked_sub(work).ok_or_else(|| refused(TOO_MANY_STEPS))?;
        Ok(())
    }

    fn take_bytes(&mut self, bytes: usize) -> Result<(), Error> {
        self.take_work(bytes / 64)?;
        self.bytes = self.bytes.checked_sub(bytes).ok_or_else(|| {
            refused("the template makes and prints more text than any conversation needs")
        })?;
        Ok(())
    }

    fn check_text(&self, text: usize) -> Result<(), Error> {
        if text <= self.text {
            return Ok(());
        }
        Err(refused(format!("the template makes a value of more than {} bytes", self.text)))
    }

    fn check_nodes(&self, nodes: usize) -> Result<(), Error> {
        if nodes <= self.nodes {
            return Ok(());
        }
        Err(refused(format!("the template makes a list of more than {} values", self.nodes)))
    }

    /// Walks through all of a value; gives the bytes of text and the number of values in it.
    fn measure(&mut self, value: &Value) -> Result<Size, Error> {
        let mut size = Size::default();
        let walked = self.walk(value, 0, &mut size);
        self.take_work(size.nodes)?;
        walked.map(|()| size)
    }

    fn walk(&self, value: &Value, depth: usize, size: &mut Size) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(refused(format!(
                "the template makes a value that is nested more than {DEEPEST} deep, or holds itself"
            )));
        }
        size.nodes += 1;
        self.check_nodes(size.nodes)?;
        match value.kind() {
            ValueKind::String => size.text += value.as_str().map_or(0, str::len),
            ValueKind::Bytes => size.text += value.as_bytes().map_or(0, <[u8]>::len),
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    self.walk(&item, depth + 1, size)?;
                }
            }
            ValueKind::Map => {
                size.namespace |= depth > 0 && is_namespace(value);
                for key in value.try_iter()? {
                    self.walk(&key, depth + 1, size)?;
                    self.walk(&value.get_item(&key)?, depth + 1, size)?;
                }
            }
            _ => {}
        }
        self.check_text(size.text)
    }
}

const TOO_MANY_STEPS: &str = "the template takes more steps than any conversation needs";

#[derive(Default)]
struct Size {
    text: usize,
    nodes: usize,
    /// Whether there is a namespace within.
    namespace: bool,
}

fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Checks a value that was just made. One that would make its items when they are asked for holds them afterwards, as
/// such values can be stacked upon each other without end.
fn made(state: &mut State, value: Value) -> Result<Value, Error> {
    let budget = Budget::of(state);
    match value.kind() {
        ValueKind::String => {
            let length = value.as_str().map_or(0, str::len);
            budget.check_text(length)?;
            budget.take_bytes(length)?;
            Ok(value)
        }
        ValueKind::Seq | ValueKind::Map => {
            let size = budget.measure(&value)?;
            if size.namespace && is_namespace(&value) {
                return Err(refused(NAMESPACE));
            }
            budget.take_bytes(value.len().unwrap_or(0) * size_of::<Value>())?;
            Ok(value)
        }
        ValueKind::Iterable if value.downcast_object_ref::<Items>().is_none() => {
            let mut items = Vec::new();
            for item in value.try_iter()? {
                budget.check_nodes(items.len())?;
                items.push(item);
            }
            let value = Value::from_object(Items(items));
            budget.measure(&value)?;
            budget.take_bytes(value.len().unwrap_or(0) * size_of::<Value>())?;
            Ok(value)
        }
        _ => Ok(value),
    }
}

const NAMESPACE: &str = "a namespace within a namespace is not supported";

/// The items of an iteration, which can be gone through again.
#[derive(Debug)]
struct Items(Vec<Value>);

impl Object for Items {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }
}

/// Checks values that are about to be compared, or turned into text together.
fn operands(state: &mut State, pair: Value) -> Result<Value, Error> {
    let budget = Budget::of(state);
    for index in 0..2 {
        count_argument(budget, &pair.get_item(&Value::from(index))?)?;
    }
    Ok(pair)
}

/// Checks values that are about to be written one behind the other, and gives them as Python writes them.
fn texts(state: &mut State, pair: Value) -> Result<Value, Error> {
    let pair = operands(state, pair)?;
    Ok(python::with_item_texts(&pair))
}

fn count_argument(budget: &mut Budget, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String => budget.take_work(value.as_str().map_or(0, str::len) / 64),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            let size = budget.measure(value)?;
            budget.take_work(size.text / 64)
        }
        _ => Ok(()),
    }
}

/// Checks a value that is about to become an attribute of a namespace.
fn attribute(state: &mut State, pair: Value) -> Result<Value, Error> {
    let value = pair.get_item(&Value::from(0))?;
    let budget = Budget::of(state);
    if is_namespace(&value) || budget.measure(&value)?.namespace {
        return Err(refused(NAMESPACE));
    }
    Ok(pair)
}

/// What a loop goes through. The engine goes through none as through an empty list, which Python refuses; and it doesn't
/// know how many characters a string has, so that `loop.last` would never be.
fn looped(state: &mut State, value: Value) -> Result<Value, Error> {
    refuse_none(&value)?;
    let Some(text) = value.as_str() else { return Ok(value) };
    // Counted as it is looked at; each round takes fuel.
    Budget::of(state).take_work(text.len())?;
    Ok(Value::make_object_iterable(value, |value| {
        let mut characters = value.as_str().unwrap_or_default().chars();
        let count = characters.clone().count();
        Box::new((0..count).map(move |_| characters.next().map(Value::from).unwrap_or_default()))
    }))
}

fn refuse_none(value: &Value) -> Result<(), Error> {
    if value.is_none() { Err(refused("none has no items to go through")) } else { Ok(()) }
}

/// How many there are in a value; none in what isn't defined, as in Python.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// Whether Python could go through a value.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Whether a value has a length and items, which strings and mappings have too. Slices and ranges, which have these in Python,
/// aren't told from generators here.
fn is_sequence(value: &Value) -> bool {
    let sequences =
        [ValueKind::Undefined, ValueKind::String, ValueKind::Bytes, ValueKind::Seq, ValueKind::Map];
    sequences.contains(&value.kind()) && !is_namespace(value)
}

fn printed(state: &mut State, length: usize) -> Result<usize, Error> {
    Budget::of(state).take_bytes(length)?;
    Ok(length)
}

fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let budget = Budget::of(state);
    let length = match value.kind() {
        ValueKind::String => value.as_str().map_or(0, str::len),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            let size = budget.measure(value)?;
            size.text + 8 * size.nodes
        }
        _ => 8,
    };
    budget.take_bytes(length)?;
    match python::text(value) {
        Some(text) => Ok(out.write_str(&text)?),
        None => minijinja::escape_formatter(out, state, value),
    }
}

/// The most bytes that one value may have.
pub(super) fn longest(state: &mut State) -> usize {
    Budget::of(state).text
}

/// Filters, functions and methods that look at one item or at how many there are.
const CHEAP: [&str; 11] = [
    "attr",
    "count",
    "d",
    "default",
    "dict",
    "first",
    "get",
    "last",
    "length",
    "namespace",
    "safe",
];

/// Checks a call of a filter, function or method before it is made. `arguments` begins with what a filter or method is
/// applied to.
pub(super) fn before(state: &mut State, name: &str, arguments: &[Value]) -> Result<(), Error> {
    let budget = Budget::of(state);
    if !CHEAP.contains(&name) {
        for argument in arguments {
            count_argument(budget, argument)?;
        }
    }
    let text = |index: usize| arguments.get(index).and_then(Value::as_str);
    let named = |name: &str| {
        let named = arguments.last().filter(|last| last.is_kwargs())?;
        named.get_attr(name).ok().filter(|value| !value.is_undefined())
    };
    let number = |index: usize, name: &str| {
        let positional = arguments.get(index).filter(|value| !value.is_kwargs()).cloned();
        positional.or_else(|| named(name)).and_then(|value| value.as_usize())
    };
    let length = match name {
        "indent" => {
            let lines = text(0).map_or(0, |text| text.matches('\n').count() + 1);
            lines.saturating_mul(number(1, "width").unwrap_or(4))
        }
        "replace" => {
            let (Some(whole), Some(from), Some(to)) = (text(0), text(1), text(2)) else {
                return Ok(());
            };
            let times = if from.is_empty() { whole.len() + 1 } else { whole.matches(from).count() };
            times.saturating_mul(to.len())
        }
        "join" => {
            // The method stands on what is put between, the filter on what is joined.
            let sizes = (arguments.iter().take(2))
                .map(|argument| match argument.as_str() {
                    Some(text) => (text.len(), argument.len().unwrap_or(0)),
                    None => (0, argument.len().unwrap_or(0)),
                })
                .collect::<Vec<_>>();
            match sizes.as_slice() {
                [(a, items_a), (b, items_b)] => {
                    a.saturating_mul(*items_b).max(b.saturating_mul(*items_a))
                }
                _ => 0,
            }
        }
        "format" => {
            let whole = text(0).unwrap_or_default();
            let places = whole.matches(['%', '{']).count();
            let written = whole.split(|c: char| !c.is_ascii_digit()).map(|digits| {
                if digits.is_empty() { 0 } else { digits.parse().unwrap_or(usize::MAX) }
            });
            // A width may come as an argument.
            let given = arguments.iter().skip(1).filter_map(|argument| {
                (whole.contains('*') || whole.contains("{:{"))
                    .then(|| argument.as_usize())
                    .flatten()
            });
            let widest = written.chain(given).max().unwrap_or(0);
            let longest = arguments.iter().skip(1).filter_map(Value::as_str).map(str::len).max();
            places.saturating_mul(widest.saturating_add(longest.unwrap_or(0)))
        }
        // A character has up to four bytes.
        "center" | "ljust" | "rjust" | "zfill" => number(1, "width").unwrap_or(0).saturating_mul(4),
        "batch" | "slice" => {
            budget.check_nodes(number(1, "count").unwrap_or(0))?;
            0
        }
        "sum" => {
            let is_text = |value: &Value| value.kind() == ValueKind::String;
            let items = arguments.first().filter(|value| !is_text(value));
            let start = number_or_text(arguments, &named);
            let mut items = items.and_then(|items| items.try_iter().ok()).into_iter().flatten();
            if start.is_some_and(|start| is_text(&start)) || items.any(|item| is_text(&item)) {
                return Err(refused("sum: texts cannot be summed up; join them"));
            }
            0
        }
        _ => 0,
    };
    budget.check_text(length)
}

/// The start of a sum.
fn number_or_text(arguments: &[Value], named: &impl Fn(&str) -> Option<Value>) -> Option<Value> {
    arguments.get(2).filter(|value| !value.is_kwargs()).cloned().or_else(|| named("start"))
}

/// Calls a filter or function within its bounds.
fn call(
    state: &mut State,
    name: &str,
    function: &Value,
    arguments: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let mut arguments = arguments.into_values();
    if let ("list" | "join", [value, ..]) = (name, arguments.as_slice()) {
        refuse_none(value)?;
    }
    before(state, name, &arguments)?;
    if as_python_writes(name, &mut arguments) {
        before(state, name, &arguments)?;
    }
    let value = function.call(state, &arguments)?;
    made(state, value)
}

/// Puts texts, as Python writes them, in place of what a filter or test would make texts of; says whether it did.
fn as_python_writes(name: &str, arguments: &mut [Value]) -> bool {
    match (name, arguments) {
        (
            "string" | "lower" | "upper" | "title" | "capitalize" | "replace" | "trim" | "safe"
            | "escape" | "e" | "center" | "wordcount",
            [value, ..],
        ) => *value = python::with_text(value),
        ("join", [value, ..]) => *value = python::with_item_texts(value),
        ("format", [format, values @ ..])
            if format.as_str().is_some_and(python::has_only_text_places) =>
        {
            values.iter_mut().for_each(|value| *value = python::with_text(value));
        }
        _ => return false,
    }
    true
}

/// [`call`] of a method, by what makes it.
pub(super) fn call_method(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: &[Value],
    method: impl FnOnce(&mut State) -> Result<Value, Error>,
) -> Result<Value, Error> {
    let mut all = vec![value.clone()];
    all.extend_from_slice(arguments);
    before(state, name, &all)?;
    // What it gives is checked by the instruction that follows.
    method(state)
}

macro_rules! add_bounded {
    ($environment:ident.$add:ident: $($name:literal = $function:expr),* $(,)?) => {$({
        let function = Value::from_function($function);
        $environment.$add($name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
            call(state, $name, &function, arguments)
        });
    })*};
}

/// Sets the bounds of an environment's templates and puts its filters, tests and functions within them.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_fuel(Some(FUEL));
    environment.set_formatter(print);
    environment.add_filter(MADE, made);
    environment.add_filter(OPERANDS, operands);
    environment.add_filter(TEXTS, texts);
    environment.add_filter(ATTRIBUTE, attribute);
    environment.add_filter(PRINTED, printed);
    environment.add_filter(LOOPED, looped);
    // It prints everything that there is, and no template of `transformers` has it.
    environment.remove_global("debug");
    add_bounded!(environment.add_function:
        "range" = minijinja::functions::range,
        "dict" = minijinja::functions::dict,
        "namespace" = minijinja::functions::namespace,
    );
    add_bounded!(environment.add_filter:
        "safe" = filters::safe,
        "escape" = filters::escape,
        "e" = filters::escape,
        "lower" = filters::lower,
        "upper" = filters::upper,
        "title" = filters::title,
        "capitalize" = filters::capitalize,
        "replace" = filters::replace,
        "length" = length,
        "count" = length,
        "dictsort" = filters::dictsort,
        "items" = filters::items,
        "reverse" = filters::reverse,
        "trim" = filters::trim,
        "join" = filters::join,
        "split" = filters::split,
        "lines" = filters::lines,
        "default" = filters::default,
        "d" = filters::default,
        "round" = filters::round,
        "abs" = filters::abs,
        "int" = python::int,
        "truncate" = python::truncate,
        "center" = python::center,
        "wordcount" = python::wordcount,
        "urlencode" = python::urlencode,
        "float" = filters::float,
        "attr" = filters::attr,
        "first" = filters::first,
        "last" = filters::last,
        "min" = filters::min,
        "max" = filters::max,
        "sort" = filters::sort,
        "list" = filters::list,
        "string" = filters::string,
        "bool" = filters::bool,
        "batch" = filters::batch,
        "slice" = filters::slice,
        "sum" = filters::sum,
        "indent" = filters::indent,
        "select" = filters::select,
        "reject" = filters::reject,
        "selectattr" = filters::selectattr,
        "rejectattr" = filters::rejectattr,
        "map" = filters::map,
        "groupby" = filters::groupby,
        "unique" = filters::unique,
        "chain" = filters::chain,
        "zip" = filters::zip,
        "pprint" = filters::pprint,
        "format" = filters::format,
        "tojson" = super::json::tojson,
    );
    add_bounded!(environment.add_test:
        "eq" = tests::is_eq,
        "equalto" = tests::is_eq,
        "==" = tests::is_eq,
        "ne" = tests::is_ne,
        "!=" = tests::is_ne,
        "lt" = tests::is_lt,
        "lessthan" = tests::is_lt,
        "<" = tests::is_lt,
        "le" = tests::is_le,
        "<=" = tests::is_le,
        "gt" = tests::is_gt,
        "greaterthan" = tests::is_gt,
        ">" = tests::is_gt,
        "ge" = tests::is_ge,
        ">=" = tests::is_ge,
        "in" = tests::is_in,
        "startingwith" = tests::is_startingwith,
        "endingwith" = tests::is_endingwith,
        "iterable" = is_iterable,
        "sequence" = is_sequence,
        "lower" = tests::is_lower,
        "upper" = tests::is_upper,
    );
}

/// The error of a rendering in words that say which bound it met.
pub(super) fn in_words(error: &Error) -> Option<&'static str> {
    (error.kind() == ErrorKind::OutOfFuel).then_some(TOO_MANY_STEPS)
}
