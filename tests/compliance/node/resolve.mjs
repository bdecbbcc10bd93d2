// Lets Node run the suite as it is: Bun resolves imports without an extension, and Node does not.
import { registerHooks } from "node:module";

registerHooks({
  resolve(specifier, context, next) {
    const hasNoExtension = specifier.startsWith(".") && !/\.[a-z]+$/.test(specifier);
    return next(hasNoExtension ? `${specifier}.ts` : specifier, context);
  },
});
