"""Private names of other libraries. No other package of ficco uses a name that begins with `_`.

A private name can change or disappear in any release. Each one is found here once, when its module
is imported, and has a fallback that uses only public names. `finding.ABSENT` lists the names that
the installed release lacks; `ficco doctor` shows them.

`ficco.core.private.torch_core`: names for the path of a call.
`ficco.core.private.torch_layers`: names of modules and DTensors, for models.
`ficco.core.private.triton_core`: names of Triton, for kernels that the pack lacks.
`ficco.core.private.frameworks`: names of Megatron-Core, Hugging Face and others.
"""
