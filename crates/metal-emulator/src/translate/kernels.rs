//! The kernels of a text: their names for the host, and what is bound to their parameters.

use super::constants::Constants;
use super::text::{Text, Wrong, argument_of, has};
use std::collections::HashMap;

/// The attributes of parameters that the GPU fills in.
const BUILTINS: &[&str] = &[
    "dispatch_simdgroups_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "grid_origin",
    "grid_size",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "thread_execution_width",
    "thread_index_in_quadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_threadgroup",
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_grid",
    "threads_per_simdgroup",
    "threads_per_threadgroup",
];

/// An entry point.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The name that the host knows it by.
    pub name: String,
    /// The function, in C++.
    function: String,
    /// Its name, without the arguments of a template.
    plain: String,
    most_threads: String,
    /// What is bound to each parameter, in C++.
    arguments: Vec<String>,
}

impl Kernel {
    /// The line of C++ that makes it known to the runtime.
    pub fn entry(&self, constants: &Constants) -> String {
        let Self { name, function, plain, most_threads, arguments } = self;
        let (constants, arguments) = (constants.used_by(plain), arguments.join(", "));
        format!(
            "MSL_KERNEL(\"{name}\", ({function}), {most_threads}, \"{constants}\", {arguments})\n"
        )
    }
}

/// Finds the kernels, and takes their words and explicit instantiations out of the text.
pub fn kernels(text: &mut Text) -> Result<Vec<Kernel>, Wrong> {
    let marks: Vec<usize> = (0..text.len())
        .filter(|&at| {
            text.is(at, "kernel")
                || text.attributes.get(&at).is_some_and(|inside| has(inside, "kernel"))
        })
        .collect();
    let mut kernels = Vec::new();
    let mut definitions = HashMap::new();
    let mut instantiations = Vec::new();
    for mark in marks {
        let before = text.before(mark);
        if let Some(start) = before.filter(|&at| text.is(at, "template")) {
            instantiations.push(start);
            continue;
        }
        let is_template = before.is_some_and(|at| text.is(at, ">"));
        let definition = definition(text, before.map_or(0, |at| at + 1), mark, is_template)?;
        if definitions.contains_key(&definition.function) {
            let message = format!("there are two kernels named `{}`", definition.function);
            return Err(text.wrong(mark, message));
        }
        definitions.insert(definition.function.clone(), definition.clone());
        if !is_template {
            kernels.push(definition);
        }
        if text.is(mark, "kernel") {
            text.set(mark, "");
        }
    }
    for start in instantiations {
        kernels.push(instantiation(text, start, &definitions)?);
    }
    for (i, kernel) in kernels.iter().enumerate() {
        if kernels[..i].iter().any(|other| other.name == kernel.name) {
            let message = format!("two kernels have the name `{}`", kernel.name);
            return Err(Wrong { place: None, message });
        }
    }
    Ok(kernels)
}

fn host_name(attributes: &str) -> Option<String> {
    let name = argument_of(attributes, "host_name")?;
    Some(name.replace('"', ""))
}

fn definition(text: &Text, from: usize, mark: usize, is_template: bool) -> Result<Kernel, Wrong> {
    let open = text.find(mark, &["("]).ok_or_else(|| text.wrong(mark, "a kernel without `(`"))?;
    let close = text.closing(open)?;
    let name_at = text.before(open).ok_or_else(|| text.wrong(open, "a kernel without a name"))?;
    let function = text.text(name_at).to_string();
    let attributes = text.attributes_in(from, open);
    let pieces = text.pieces(open + 1, close);
    let mut taken = Taken::default();
    for &(start, end) in &pieces {
        let attributes = text.attributes_in(start, end);
        taken.buffers.extend(argument_of(&attributes, "buffer"));
        taken.threadgroup.extend(argument_of(&attributes, "threadgroup"));
    }
    let mut arguments = Vec::new();
    for (start, end) in pieces {
        arguments.push(argument(text, start, end, &mut taken)?);
    }
    // What a template's parameters say isn't known here, and isn't checked.
    let most_threads = argument_of(&attributes, "max_total_threads_per_threadgroup")
        .filter(|count| !is_template || count.parse::<u32>().is_ok());
    Ok(Kernel {
        name: host_name(&attributes).unwrap_or_else(|| function.clone()),
        plain: function.clone(),
        function,
        most_threads: most_threads.unwrap_or_else(|| "0".into()),
        arguments,
    })
}

/// The indices that attributes name. Metal gives the others to the parameters without one, in order.
#[derive(Default)]
struct Taken {
    buffers: Vec<String>,
    threadgroup: Vec<String>,
}

fn next_free(taken: &mut Vec<String>) -> String {
    let mut index = 0_u32;
    while taken.contains(&index.to_string()) {
        index += 1;
    }
    taken.push(index.to_string());
    index.to_string()
}

fn argument(text: &Text, start: usize, end: usize, taken: &mut Taken) -> Result<String, Wrong> {
    let attributes = text.attributes_in(start, end);
    let wrong = |message: &str| {
        let parameter = text.normal(start, end);
        let at = text.counting(start, end).next().unwrap_or(start);
        text.wrong(at, format!("the parameter `{parameter}` of a kernel {message}"))
    };
    if let Some(builtin) = BUILTINS.iter().find(|name| has(&attributes, name)) {
        return Ok(format!("msl::builtin(&msl::Thread::{builtin})"));
    }
    let bound = argument_of(&attributes, "function_constant")
        .map_or(String::new(), |constant| format!(", [] {{ return bool({constant}); }}"));
    let is = |spaces: &[&str]| text.counting(start, end).any(|at| text.is_any(at, spaces));
    let named = |kind: &str| argument_of(&attributes, kind);
    let (kind, index) = if is(&["threadgroup"]) {
        let index = named("threadgroup").unwrap_or_else(|| next_free(&mut taken.threadgroup));
        ("threadgroup", index)
    } else if is(&["device", "constant"]) {
        ("buffer", named("buffer").unwrap_or_else(|| next_free(&mut taken.buffers)))
    } else if named("buffer").is_some() {
        return Err(wrong("is a buffer, but neither `device` nor `constant`"));
    } else {
        return Err(wrong(
            "has no attribute that is known: buffer(n), threadgroup(n), or a position",
        ));
    };
    if !text.counting(start, end).any(|at| text.is_any(at, &["*", "&", "["])) {
        return Err(wrong("is neither a pointer nor a reference"));
    }
    Ok(format!("msl::{kind}({index}{bound})"))
}

/// `template [[host_name("name")]] [[kernel]] decltype(function<T>) function<T>;`, or with the type
/// and the parameters written out.
fn instantiation(
    text: &mut Text,
    start: usize,
    definitions: &HashMap<String, Kernel>,
) -> Result<Kernel, Wrong> {
    let end = text
        .find(start, &[";"])
        .ok_or_else(|| text.wrong(start, "an instantiation without `;`"))?;
    let name = host_name(&text.attributes_in(start, end))
        .ok_or_else(|| text.wrong(start, "an instantiation of a kernel without host_name"))?;
    let wrong = |text: &Text| text.wrong(start, format!("`{name}`: no `function<...>` before `;`"));
    let mut last = text.before(end).ok_or_else(|| wrong(text))?;
    if text.is(last, ")") {
        last = text.before(text.opening(last)?).ok_or_else(|| wrong(text))?;
    }
    let mut first = last;
    if text.is(last, ">") {
        first = text.before(text.opening(last)?).ok_or_else(|| wrong(text))?;
    }
    let definition = definitions.get(text.text(first)).ok_or_else(|| {
        text.wrong(first, format!("`{name}`: there is no kernel `{}`", text.text(first)))
    })?;
    let function = text.inline(first, last + 1);
    text.blank(start, end + 1);
    text.attributes.retain(|at, _| !(start..end).contains(at));
    Ok(Kernel { name, function, ..definition.clone() })
}
