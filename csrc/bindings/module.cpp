// minivllm._core: the extension module. Conversion only; no logic lives in the bindings.
#include <nanobind/nanobind.h>

void bind_block_allocator(nanobind::module_& module);
void bind_decoder(nanobind::module_& module);
void bind_machine(nanobind::module_& module);

NB_MODULE(_core, module) {
    module.doc() = "Native parts of mini-vllm: the block allocator, the decoder, and what the machine can do.";
    bind_block_allocator(module);
    bind_decoder(module);
    bind_machine(module);
}
