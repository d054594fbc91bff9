//! From the Metal Shading Language, preprocessed, to C++ for the headers in `shim/`.
//!
//! Most of a kernel is C++ as it stands. Attributes are taken out and become the list of the kernels
//! and of what is bound to their parameters; address spaces are taken out; variables in threadgroup
//! memory become references to memory that the runtime keeps. With each kernel stand the function
//! constants that it depends on. Lines stay where they are.

mod constants;
mod kernels;
mod spaces;
mod text;
mod tokens;

#[cfg(test)]
mod tests;

pub use text::Wrong;

/// A translated text.
#[derive(Debug)]
pub struct Translation {
    pub code: String,
    /// The kernels' names for the host.
    pub kernels: Vec<String>,
}

/// Translates a preprocessed text.
pub fn translate(preprocessed: &str) -> Result<Translation, Wrong> {
    let mut text = text::Text::new(preprocessed)?;
    let kernels = kernels::kernels(&mut text)?;
    let constants = constants::Constants::of(&text)?;
    spaces::refuse(&text)?;
    spaces::translate(&mut text)?;
    let mut code =
        format!("#include \"kernel.h\"\n{}\n# 1 \"kernels\"\n", text.between(0, text.len()));
    for kernel in &kernels {
        code += &kernel.entry(&constants);
    }
    Ok(Translation { code, kernels: kernels.into_iter().map(|kernel| kernel.name).collect() })
}
