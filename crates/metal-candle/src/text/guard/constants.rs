//! What a template's compiler computes before anything runs: it folds operators of constants, and `"x" * 100000000`,
//! written a hundred times, would fill the memory there.

use minijinja::machinery::ast::{BinOpKind, Call, CallArg, Expr, Macro, Stmt};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use super::refused;

/// The longest text and list that are folded, in bytes and items.
const LONGEST: usize = 4096;

/// Checks every multiplication of constants in a template.
pub(super) fn check_constants(statement: &Stmt) -> Result<(), Error> {
    let all = |statements: &[Stmt]| statements.iter().try_for_each(check_constants);
    match statement {
        Stmt::Template(template) => all(&template.children),
        Stmt::EmitExpr(emit) => check(&emit.expr),
        Stmt::ForLoop(looped) => {
            check(&looped.iter)?;
            optional(&looped.filter_expr)?;
            all(&looped.body)?;
            all(&looped.else_body)
        }
        Stmt::IfCond(condition) => {
            check(&condition.expr)?;
            all(&condition.true_body)?;
            all(&condition.false_body)
        }
        Stmt::WithBlock(with) => {
            with.assignments.iter().try_for_each(|(_, value)| check(value))?;
            all(&with.body)
        }
        Stmt::Set(set) => check(&set.expr),
        Stmt::SetBlock(set) => {
            optional(&set.filter)?;
            all(&set.body)
        }
        Stmt::AutoEscape(escape) => {
            check(&escape.enabled)?;
            all(&escape.body)
        }
        Stmt::FilterBlock(block) => {
            check(&block.filter)?;
            all(&block.body)
        }
        Stmt::Block(block) => all(&block.body),
        Stmt::Macro(declared) => declaration(declared),
        Stmt::CallBlock(block) => {
            call(&block.call)?;
            declaration(&block.macro_decl)
        }
        Stmt::Do(expression) => call(&expression.call),
        Stmt::Import(import) => check(&import.expr),
        Stmt::FromImport(import) => check(&import.expr),
        Stmt::Extends(extends) => check(&extends.name),
        Stmt::Include(include) => check(&include.name),
        Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => Ok(()),
    }
}

fn declaration(declared: &Macro) -> Result<(), Error> {
    declared.defaults.iter().try_for_each(check)?;
    declared.body.iter().try_for_each(check_constants)
}

fn call(call: &Call) -> Result<(), Error> {
    check(&call.expr)?;
    arguments(&call.args)
}

fn arguments(arguments: &[CallArg]) -> Result<(), Error> {
    arguments.iter().try_for_each(|argument| match argument {
        CallArg::Pos(value)
        | CallArg::Kwarg(_, value)
        | CallArg::PosSplat(value)
        | CallArg::KwargSplat(value) => check(value),
    })
}

fn optional(expression: &Option<Expr>) -> Result<(), Error> {
    expression.iter().try_for_each(check)
}

/// Inner expressions come first, so that folding them is safe when the outer one asks for their values.
fn check(expression: &Expr) -> Result<(), Error> {
    match expression {
        Expr::Var(_) | Expr::Const(_) => Ok(()),
        Expr::Slice(slice) => {
            check(&slice.expr)?;
            [&slice.start, &slice.stop, &slice.step].into_iter().try_for_each(optional)
        }
        Expr::UnaryOp(operator) => check(&operator.expr),
        Expr::BinOp(operator) => {
            check(&operator.left)?;
            check(&operator.right)?;
            if matches!(operator.op, BinOpKind::Mul) {
                check_product(operator.left.as_const(), operator.right.as_const())?;
            }
            Ok(())
        }
        Expr::Compare(compare) => {
            check(&compare.expr)?;
            compare.ops.iter().try_for_each(|operand| check(&operand.expr))
        }
        Expr::IfExpr(condition) => {
            check(&condition.test_expr)?;
            check(&condition.true_expr)?;
            optional(&condition.false_expr)
        }
        Expr::Filter(filter) => {
            optional(&filter.expr)?;
            arguments(&filter.args)
        }
        Expr::Test(test) => {
            check(&test.expr)?;
            arguments(&test.args)
        }
        Expr::GetAttr(lookup) => check(&lookup.expr),
        Expr::GetItem(lookup) => {
            check(&lookup.expr)?;
            check(&lookup.subscript_expr)
        }
        Expr::Call(expression) => call(expression),
        Expr::List(list) => list.items.iter().try_for_each(check),
        Expr::Tuple(tuple) => tuple.items.iter().try_for_each(check),
        Expr::Map(map) => {
            map.keys.iter().try_for_each(check)?;
            map.values.iter().try_for_each(check)
        }
    }
}

fn check_product(left: Option<Value>, right: Option<Value>) -> Result<(), Error> {
    let (Some(left), Some(right)) = (left, right) else { return Ok(()) };
    for (repeated, times) in [(&left, &right), (&right, &left)] {
        let length = match repeated.kind() {
            ValueKind::String => repeated.as_str().map_or(0, str::len),
            // What the list shows is longer than it, and may be asked for.
            ValueKind::Seq | ValueKind::Iterable => repeated.to_string().len(),
            _ => continue,
        };
        let Some(times) = times.as_usize() else { continue };
        if length.saturating_mul(times) > LONGEST {
            return Err(refused(format!(
                "a constant of {length} bytes is repeated {times} times; {LONGEST} bytes are the most"
            )));
        }
    }
    Ok(())
}
