//! The C++ around the translated text: tables that the runtime reads.

use std::fmt::Write;

use super::Unit;

/// Whether the dispatch set the function constant `name`.
pub fn is_defined(name: &str) -> String {
    format!("(msl_defined_{name} != 0)")
}

/// Replaces `is_function_constant_defined(name)` in an expression.
pub fn spell_defined(expression: &str) -> String {
    const CALL: &str = "is_function_constant_defined";
    let mut out = String::new();
    let mut rest = expression;
    while let Some((before, after)) = rest.split_once(CALL) {
        let Some((_, after)) = after.split_once('(') else {
            break;
        };
        let Some((name, after)) = after.split_once(')') else {
            break;
        };
        out.push_str(before);
        out.push_str(&is_defined(name.trim()));
        rest = after;
    }
    out + rest
}

/// The C++ unit. It defines what shim/abi.h lists as defined by the translated unit.
pub fn emit(unit: &Unit, checked: bool) -> Result<String, String> {
    let mut code = String::from("#include \"metal.h\"\n");
    for (name, _) in &unit.constants {
        line(&mut code, &format!("static uint32_t msl_defined_{name};"));
    }
    code.push_str(&unit.code);
    code.push_str("\n#line 1 \"tables\"\n");
    let mut table = String::new();
    for (i, entry) in unit.entries.iter().enumerate() {
        let (name, expression) = (&entry.name, &entry.expression);
        let arguments = unit
            .kernels
            .get(&entry.function)
            .ok_or_else(|| format!("{name}: no kernel function {}", entry.function))?;
        let list: String = arguments
            .iter()
            .map(|a| format!("{{{}, {}u}}, ", a.kind, a.index))
            .collect();
        // The closing {} keeps the array from being empty.
        line(
            &mut code,
            &format!("static const MslArg msl_args_{i}[] = {{{list}{{}}}};"),
        );
        line(
            &mut code,
            &format!("MSL_UNCHECKED static void msl_run_{i}(const MslContext *c, const MslArg *a, const MslFiber *f) {{ msl::call(&{expression}, c, a, f); }}"),
        );
        line(
            &mut table,
            &format!(
                "  {{\"{name}\", msl_run_{i}, msl_args_{i}, {}}},",
                arguments.len()
            ),
        );
    }
    let count = unit.entries.len();
    write_table(&mut code, "MslKernel", "msl_kernel", &table, count);
    let table: String = unit
        .constants
        .iter()
        .map(|(name, i)| {
            format!("  {{{i}u, (void *)&{name}, sizeof({name}), &msl_defined_{name}}},\n")
        })
        .collect();
    let count = unit.constants.len();
    write_table(&mut code, "MslConstant", "msl_constant", &table, count);
    line(
        &mut code,
        &format!(
            "extern \"C\" const uint32_t msl_checked = {};",
            u32::from(checked)
        ),
    );
    line(
        &mut code,
        "extern \"C\" MSL_UNCHECKED void msl_derive_constants(void) {",
    );
    for (name, expression) in &unit.derived {
        line(&mut code, &format!("  {name} = {expression};"));
    }
    line(&mut code, "}");
    Ok(code)
}

fn write_table(code: &mut String, kind: &str, name: &str, rows: &str, count: usize) {
    line(
        code,
        &format!("extern \"C\" const {kind} {name}s[] = {{\n{rows}  {{}}}};"),
    );
    line(
        code,
        &format!("extern \"C\" const uint32_t {name}_count = {count};"),
    );
}

fn line(code: &mut String, text: &str) {
    // Writing to a String does not fail.
    let _ = writeln!(code, "{text}");
}
