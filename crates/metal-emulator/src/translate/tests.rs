use super::translate;

fn code(source: &str) -> String {
    translate(source).unwrap().code
}

fn refusal(source: &str) -> String {
    let wrong = translate(source).unwrap_err();
    format!("{}: {}", wrong.place.map_or(String::new(), |place| place.to_string()), wrong.message)
}

#[test]
fn lines_stay_where_they_are() {
    let source = "# 1 \"a.metal\"\nkernel void k(\n device float* x [[buffer(0)]],\n \
                  uint i [[thread_position_in_grid]]) {\n x[i] = 1.0;\n}\n";
    let code = code(source);
    let line = code.lines().position(|line| line.contains("1.0f")).unwrap();
    let marker = code.lines().position(|line| line.starts_with("# 1 \"a.metal\"")).unwrap();
    assert_eq!(line - marker, 4);
    assert!(code.contains(
        "MSL_KERNEL(\"k\", (k), 0, \"\", msl::buffer(0), \
         msl::builtin(&msl::Thread::thread_position_in_grid))"
    ));
}

#[test]
fn literals_have_the_types_of_metal() {
    let code =
        code("constant float4 c = {1.0, 1e-3, 0x1e, 2}; auto d = 1.5h + 2h; auto e = 1.0bf;");
    assert!(code.contains("{1.0f, 1e-3f, 0x1e, 2}"), "{code}");
    assert!(code.contains("half(1.5f) + half(2.0f)"), "{code}");
    assert!(code.contains("bfloat(1.0f)"), "{code}");
}

#[test]
fn every_threadgroup_variable_has_its_own_memory() {
    let code = code(
        "void f() { threadgroup float a[4], b; threadgroup N::T c[N::size]; \
         threadgroup float* p = a; }",
    );
    assert!(code.contains("struct msl_variable_1 { float a[4]; };"), "{code}");
    assert!(code.contains("struct msl_variable_2 { float b; };"), "{code}");
    assert!(code.contains("struct msl_variable_3 { N::T c[N::size]; };"), "{code}");
    assert!(code.contains("float* p = a;"), "{code}");
}

#[test]
fn swizzles_are_read_and_assigned() {
    let code = code("void f() { a.xy = b.zw; a.xz += b.yx; if (a.xy == c) s.x = t.xyz(); }");
    assert!(code.contains("a.template swizzled<0,1>() = b.template swizzle<2,3>()"), "{code}");
    assert!(code.contains("a.template swizzled<0,2>() += b.template swizzle<1,0>()"), "{code}");
    assert!(code.contains("if (a.template swizzle<0,1>() == c) s.x = t.xyz()"), "{code}");
}

#[test]
fn instantiations_are_kernels_of_their_own() {
    let translation = translate(
        "template <typename T> [[kernel, max_total_threads_per_threadgroup(64)]] \
         void k(device T* x [[buffer(2)]]) {}\n\
         template [[host_name(\"k_f32\")]] [[kernel]] decltype(k<float>) k<float>;\n\
         template [[host_name(\"k_f16\")]] kernel void k<half>(device half* x [[buffer(2)]]);\n",
    )
    .unwrap();
    assert_eq!(translation.kernels, ["k_f32", "k_f16"]);
    assert!(
        translation.code.contains("MSL_KERNEL(\"k_f32\", (k<float>), 64, \"\", msl::buffer(2))")
    );
    assert!(!translation.code.contains("decltype"));
}

#[test]
fn parameters_without_an_index_take_the_next_that_is_free() {
    let code = code(
        "kernel void k(device float* a, device float* b [[buffer(0)]], constant uint& c, \
         threadgroup float* d, uint e [[thread_position_in_grid]]) {}",
    );
    assert!(code.contains(
        "0, \"\", msl::buffer(1), msl::buffer(0), msl::buffer(2), msl::threadgroup(0), "
    ));
}

#[test]
fn kernels_depend_on_the_constants_of_all_that_they_name() {
    let code = code(
        "constant bool a [[function_constant(3)]]; constant int b [[function_constant(10)]];\n\
         constant int c [[function_constant(0)]]; constant int twice = 2 * b;\n\
         struct S { int x = twice; };\n\
         namespace n { template <typename T> inline T f(T x) { return x + S().x; } }\n\
         kernel void k1(device int* x) { x[0] = n::f(1); }\n\
         kernel void k2(device int* x [[buffer(0), function_constant(a)]]) {}\n\
         template <typename T> kernel void k3(device T* x) { x[0] = c; }\n\
         template [[host_name(\"k3\")]] kernel void k3<int>(device int* x);\n\
         kernel void k4(device int* x) { x[0] = 1; }",
    );
    for (kernel, constants) in [("k1", " 10 "), ("k2", " 3 "), ("k3<int>", " 0 "), ("k4", "")] {
        assert!(code.contains(&format!("({kernel}), 0, \"{constants}\", ")), "{kernel}: {code}");
    }
}

#[test]
fn functions_that_differ_in_address_space_become_one() {
    let code = code(
        "float f(device float* p) { return *p; }\nfloat f(threadgroup float* p) { return *p; }\n\
         struct S { S() threadgroup = default; S() thread = default; };",
    );
    assert_eq!(code.matches("return *p").count(), 1);
    assert_eq!(code.matches("= default").count(), 1);
}

#[test]
fn what_metal_refuses_is_refused_with_its_place() {
    let at = |line: &str| format!("# 7 \"a.metal\"\n{line}\n");
    for (line, message) in [
        (
            "void f(float* x, int n) { }",
            "a.metal:7: the parameter `float * x` has no address space",
        ),
        ("void f() { float* p = 0; }", "a.metal:7: the declaration of `p` has no address space"),
        ("void f() { double x; }", "a.metal:7: Metal has no `double`"),
        ("kernel void k(float x [[stage_in]]) {}", "has no attribute that is known"),
        ("kernel void k(float x [[buffer(0)]]) {}", "neither `device` nor `constant`"),
        ("void f() { const threadgroup float x[4] = 0; }", "at the start of a statement"),
        (
            "float f(device float* p) { return 1; } float f(threadgroup float* p) { return 2; }",
            "the emulator keeps the first only",
        ),
        ("void f( { }", "`(` is never closed"),
        (
            "constant bool a [[function_constant(1)]]; constant int b [[function_constant(1)]];",
            "a.metal:7: `a` and `b` are both the function constant 1",
        ),
    ] {
        let refusal = refusal(&at(line));
        assert!(refusal.contains(message), "{line}: {refusal}");
    }
}
