# sluice_embed_text(INPUT OUTPUT SYMBOL): writes OUTPUT, a C++ source that defines `const char* const SYMBOL` in namespace
# sluice with the text of INPUT, and configures again when INPUT changes.
function(sluice_embed_text input output symbol)
  file(READ ${input} text)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${input})
  # A string literal may be limited to 64 KiB; the texts embedded here are far smaller.
  file(CONFIGURE OUTPUT ${output} @ONLY CONTENT
       "namespace sluice {\nextern const char* const @symbol@;\nconst char* const @symbol@ = R\"embedded(@text@)embedded\";\n}  // namespace sluice\n")
endfunction()
